"""Opens a bundle: maps the file, checks it, and gives its tensors without copying a byte."""

from __future__ import annotations

import functools
import hashlib
import mmap
import warnings
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, cast

from gemel.models.bundle.checks import architecture_problems, manifest_problems, scale_problems
from gemel.models.bundle.format import (
    CHUNK_BYTES,
    NO_BUNDLE,
    BundleFile,
    Header,
    dtype_of,
    open_file,
    parse_header,
)
from gemel.models.bundle.manifest import (
    MANIFEST_KEY,
    BundleQuery,
    Manifest,
    StoredTensor,
    parse_manifest,
)
from gemel.models.bundle.model_spec import (
    REMEDY,
    ModelSpec,
    architecture,
    load_model_spec,
    model_spec,
)
from gemel.models.bundle.query_documents import document_problems
from gemel.models.errors import BundleError, InputError
from gemel.models.files.documents import ParseError
from gemel.models.files.extras import MERGE, is_installed
from gemel.models.predictor import Predictor, TensorPreprocess, add_predictor

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gemel.models.predictor import FrameModel


class Bundle:
    """An open bundle; its tensors are views of the mapped, read-only file.

    Writing to a view, or training a module built without `copy`, faults.
    """

    def __init__(
        self,
        file: BundleFile,
        mapping: mmap.mmap,
        header: Header,
        manifest: Manifest,
        factories: Collection[str],
        folder: Path | None = None,
    ) -> None:
        self.path = file.path
        self.file = file
        self.manifest = manifest
        self.header = header
        self.factories = frozenset(factories)
        self.folder = folder
        self.mapping = mapping
        self._unpacked: weakref.WeakValueDictionary[tuple[str, StoredTensor], Tensor] = (
            weakref.WeakValueDictionary()
        )
        self._queries = {query.id: query for query in manifest.queries}

    @property
    def queries(self) -> tuple[BundleQuery, ...]:
        """The queries in the order of the manifest."""
        return self.manifest.queries

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the whole file, read once. OSError where bytes are gone."""
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(CHUNK_BYTES))
        for start in range(0, len(self.mapping), CHUNK_BYTES):
            piece = buffer[: min(CHUNK_BYTES, len(self.mapping) - start)]
            self.file.read(start, piece)
            digest.update(piece)
        return digest.hexdigest()

    @functools.cached_property
    def _data(self) -> Tensor:
        """The data section as one uint8 tensor over the mapping."""
        import torch

        with warnings.catch_warnings():
            # torch has no read-only tensors and warns; the operating system keeps the mapping read-only for us.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self.mapping, dtype=torch.uint8, offset=self.header.data_start)

    def query(self, query_id: str) -> BundleQuery:
        """The query of this id; InputError when there is none."""
        if query_id not in self._queries:
            ids = ", ".join(self._queries)
            raise InputError(self.path, f"has no query '{query_id}'", f"it has: {ids}")
        return self._queries[query_id]

    def tensor(self, name: str) -> Tensor:
        """The tensor of this name: a view of the mapped file, no copy."""
        entry = self.header.entries[name]
        return self._data[entry.begin : entry.end].view(dtype_of(entry.dtype)).view(entry.shape)

    def read(self, name: str, room: Tensor | None = None) -> Tensor:
        """The tensor of this name in `room` (uint8, its bytes, on the CPU) or in memory of its own.

        OSError when its bytes are gone, or no longer those that were proven.
        """
        import torch

        entry = self.header.entries[name]
        room = torch.empty(entry.nbytes, dtype=torch.uint8) if room is None else room
        self.read_bytes(name, memoryview(room.numpy()))  # type: ignore[arg-type]
        return room.view(dtype_of(entry.dtype)).view(entry.shape)

    def read_bytes(self, name: str, room: memoryview | None = None) -> memoryview:
        """The bytes of the tensor of this name in `room` or in memory of their own; OSError as `read`."""
        entry = self.header.entries[name]
        room = memoryview(bytearray(entry.nbytes)) if room is None else room
        self.file.read(self.header.data_start + entry.begin, room)
        return room

    def wide_tensor(self, query_id: str, key: str) -> Tensor:
        """The tensor at a state_dict key of a query as its architecture uses it.

        A packed one is unpacked to float32 in memory of its own, which lives as long as any caller holds it.
        """
        query = self.query(query_id)
        name = query.tensors[key]
        packed = query.stored.get(key)
        if packed is None:
            return self.tensor(name)
        parameter = self._unpacked.get((name, packed))
        if parameter is None:
            from torch import nn

            from gemel.models.quantization import PackedWeight

            scale = None if packed.scale is None else self.tensor(packed.scale)
            stored = self.tensor(name)
            wide = PackedWeight(
                stored, scale, packed.dtype, packed.shape or tuple(stored.shape)
            ).wide()
            # A parameter is assigned to a module as it is; of a plain tensor the module would keep the memory alone.
            parameter = self._unpacked[name, packed] = nn.Parameter(wide, requires_grad=False)
        return parameter

    def document_of(self, query_id: str) -> bytes:
        """The ONNX document of a query's network; InputError where the bundle does not hold it."""
        name = self.query(query_id).network_document
        if name is None:
            problem = f"query {query_id}: the bundle does not hold its network"
            raise InputError(self.path, problem, f"merge it again, or pip install {MERGE}")
        entry = self.header.entries[name]
        return self.mapping[
            self.header.data_start + entry.begin : self.header.data_start + entry.end
        ]

    def nbytes(self, name: str) -> int:
        """Bytes of the tensor of this name."""
        return self.header.entries[name].nbytes

    def names_in_order(self, query_id: str) -> tuple[str, ...]:
        """The unique tensors of a query, scales included, in file (load) order."""
        needed = set(self.query(query_id).places().values())
        return tuple(name for name in self.header.entries if name in needed)

    def check(self, query_id: str) -> None:
        """Raise BundleError unless the query's tensors fit its architecture, or without torch its document.

        No tensor is read.
        """
        query = self.query(query_id)
        if is_installed("torchvision"):
            self._check(query, load_model_spec(query, lambda: self._architecture(query)))
        else:
            self.check_document(query_id)

    def check_document(self, query_id: str) -> None:
        """Raise BundleError unless the query's tensors fit its document, InputError where it has none."""
        for problem in document_problems(
            self.query(query_id), self.document_of(query_id), self.header.entries
        ):
            raise BundleError(self.path, problem, REMEDY)

    def _architecture(self, query: BundleQuery, device: str = "meta") -> nn.Module:
        document = None if query.graph is None else self.tensor(query.graph).numpy().tobytes()
        return architecture(query, self.factories, self.path, self.folder, document, device)

    def build_unbound(self, query_id: str, device: str | torch.device) -> nn.Module:
        """The query's architecture without its weights, in eval mode; what it holds besides them is on `device`."""
        return self._fill(self.query(query_id), self.build(query_id, "meta"), device)

    def _fill(self, query: BundleQuery, model: nn.Module, device: str | torch.device) -> nn.Module:
        from gemel.models.zoo.user_models import fill_loose_tensors, has_loose_tensors

        return (
            fill_loose_tensors(model, self._architecture(query, "cpu"), device)
            if has_loose_tensors(model)
            else model
        )

    def _check(self, query: BundleQuery, spec: ModelSpec) -> None:
        for problem in architecture_problems(query, spec, self.header.entries):
            raise BundleError(self.path, problem, REMEDY)

    def build(
        self, query_id: str, device: str | torch.device = "cpu", copy: bool = False
    ) -> FrameModel:
        """The query's model in eval mode, bound to the mapped tensors (CPU) or to copies of them (other devices).

        Its `preprocess` turns a frame, uint8 RGB (H, W, 3), into the batch (1, 3, H, W) that it takes, and its
        `predict` a frame or a PIL image into a prediction (models.predictions) of its `classes`. Packed tensors are
        unpacked. On the device "meta" it is the architecture alone, and no tensor is read.
        With `copy` the module has its own memory and may be trained. A model that is not in the zoo is
        imported only when its name is in the bundle's `factories`. Raises BundleError when the tensors
        don't fit the architecture, before anything is allocated.
        """
        import torch

        query = self.query(query_id)
        model = self._architecture(query)
        self._check(query, model_spec(model))
        if torch.device(device).type == "meta":
            return cast("FrameModel", model.requires_grad_(copy).eval())
        model = self._fill(query, model, "cpu")
        state = {path: self.wide_tensor(query_id, path) for path in query.tensors}
        # Moving a module moves its parameters, here everyone's.
        if copy or torch.device(device).type != "cpu":
            state = {path: tensor.clone() for path, tensor in state.items()}
        model.load_state_dict(state, strict=True, assign=True)
        unfilled = [name for name, tensor in model.named_buffers() if tensor.is_meta]
        if unfilled:
            problem = f"{query.model} has buffers outside its state_dict: {unfilled[0]}"
            raise BundleError(self.path, problem, "register them as persistent")
        model = model.requires_grad_(copy).to(device).eval()
        prepare = TensorPreprocess(query.preprocess, query.region)
        return add_predictor(
            model, Predictor(model, query.task, query.classes, prepare, query.least_score), query_id
        )

    def __repr__(self) -> str:
        return f"<bundle {self.path}: {', '.join(f'{query.id} ({query.model})' for query in self.queries)}>"


def open_bundle(
    path: str | Path, factories: Collection[str] = (), folder: Path | None = None
) -> Bundle:
    """Map a bundle read-only and check its header, seal and manifest before anything is allocated.

    `factories` names the `package.module:factory` models that may be imported, from the local config; they may lie in
    `folder` (that of the config) or on Python's path. Raises InputError when the file cannot be read and BundleError
    when it is no sound bundle; only `verify_bundle` checks the contents of the tensors.
    """
    path = Path(path)
    file = open_file(path, REMEDY)
    mapping = file.map()
    try:
        header, manifest = parse(mapping)
        for problem in manifest_problems(manifest, header) or scale_problems(
            manifest, header, mapping
        ):
            raise ParseError(problem)
    except ParseError as error:
        if path.suffix.lower() in (".onnx", ".pt2"):
            raise BundleError(
                path, "is a model, no bundle", "read it with gemel.load_model, pack or merge it"
            ) from None
        hint = (
            "give what `gemel merge` or `gemel pack` wrote" if NO_BUNDLE in str(error) else REMEDY
        )
        raise BundleError(path, str(error), hint) from None
    return Bundle(file, mapping, header, manifest, factories, folder)


def map_file(path: Path) -> mmap.mmap:
    """Map a file read-only; InputError when it cannot be read, BundleError when it is empty."""
    return open_file(path, REMEDY).map()


def parse(mapping: mmap.mmap) -> tuple[Header, Manifest]:
    """Header and manifest of a mapped bundle; raises ParseError."""
    header = parse_header(mapping)
    if MANIFEST_KEY not in header.metadata:
        raise ParseError(f"metadata key {MANIFEST_KEY} is missing: it is no bundle")
    return header, parse_manifest(header.metadata[MANIFEST_KEY])
