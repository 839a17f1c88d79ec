"""Writes all queries of a bundle as ONNX files beside ONE file of weights, in which equal tensors have one offset.

Whatever loads ONNX files with external data loads these; processes and sessions that map the file share its pages. For
a Triton server each model has a folder, with one more name of that file.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from gemel.models.errors import InputError
from gemel.models.export.onnx_file import (
    DYNAMIC,
    Batch,
    ExportedModel,
    Shape,
    check_graph,
    describe_file,
)
from gemel.models.export.query_export import query_graph
from gemel.models.files.io import check_apart, check_output, describe_problem
from gemel.models.graph.proto_graph import ProtoGraph, refer_to_file
from gemel.models.graph.records import SUFFIX

if TYPE_CHECKING:
    import onnx

    from gemel.models.bundle import Bundle, BundleQuery

WEIGHTS = "weights.bin"
MIN_BYTES = 1024
"""Smaller tensors lie in the ONNX files themselves, where readers look for shapes and other constants."""
PAGE_BYTES, LINE_BYTES, LARGE_BYTES = 4096, 64, 65_536
"""Large tensors begin at a page, as readers that map them ask for; others at a cache line."""

Layout = Literal["flat", "triton"]
MAX_BATCH = 8
"""Frames that a Triton server joins at most, of a model that takes any number."""
_TRITON_TYPES = {
    1: "FP32",
    2: "UINT8",
    3: "INT8",
    6: "INT32",
    7: "INT64",
    9: "BOOL",
    10: "FP16",
    11: "FP64",
}


@dataclass(frozen=True)
class ExportedFolder:
    """A written folder: the file of each query, and the bytes of the weights that they share."""

    path: Path
    files: dict[str, ExportedModel]
    weights_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The value as `gemel bundle export --json` prints it."""
        return {
            "folder": str(self.path),
            "weights": {"file": str(self.path / WEIGHTS), "bytes": self.weights_bytes},
            "queries": [{"query": query, **file.to_json()} for query, file in self.files.items()],
        }


def export_folder(
    bundle: Bundle, folder: str | Path, batch: Batch | None = None, layout: Layout = "flat"
) -> ExportedFolder:
    """Write `ID.onnx` for each query of a bundle, and `weights.bin`, into a new or empty folder; whole or not at all.

    With the layout `triton` it is a model repository: `ID/1/model.onnx`, `ID/config.pbtxt`, and `ID/1/weights.bin`,
    hard links to one file.

    Raises InputError where the folder holds something or cannot be written, and for a model that cannot be exported.
    """
    folder = Path(folder)
    check_apart([("--out", folder)], [("the bundle", bundle.path)])
    if folder.is_dir() and not folder.is_symlink():
        if any(folder.iterdir()):
            raise InputError(folder, "is not empty", "name a new folder")
        check_output(folder / WEIGHTS)
    else:
        check_output(folder)
    with describe_problem(folder):
        temporary = folder.with_name(f".{secrets.token_hex(8)}.tmp")
        temporary.mkdir()
        try:
            with open(temporary / WEIGHTS, "wb") as file:
                weights = _Weights(file)
                graphs = {}
                for query in bundle.queries:
                    graphs[query.id] = weights.write(
                        query_graph(bundle, query.id, batch, _scaled_apart(bundle, query))
                    )
                file.flush()
                os.fsync(file.fileno())
            files = {
                query: _write_graph(graph, temporary / f"{query}.onnx", folder)
                for query, graph in graphs.items()
            }
            if layout == "triton":
                files = {
                    query: _move_to_repository(temporary, query, file)
                    for query, file in files.items()
                }
                (temporary / WEIGHTS).unlink()
            os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return ExportedFolder(folder, files, weights.nbytes)


def _scaled_apart(bundle: Bundle, query: BundleQuery) -> set[str]:
    """The paths of convolutions whose weight is also used with other scales: folded, it would be stored twice."""

    def scale_of(owner: BundleQuery, key: str) -> str | None:
        return owner.tensors.get(f"{key.removesuffix('.weight')}{SUFFIX}.weight")

    members = {shared.tensor: shared.members for shared in bundle.manifest.shared}
    paths = set()
    for key, name in query.tensors.items():
        if (query_scale := scale_of(query, key)) is not None:
            member_scales = (
                scale_of(bundle.query(other), place) for other, place in members.get(name, ())
            )
            if any(other != query_scale for other in member_scales):
                paths.add(key.removesuffix(".weight").removeprefix("network."))
    return paths


class _Weights:
    """The file of weights in the making: the offset of each content."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.nbytes = 0
        self._offsets: dict[bytes, int] = {}

    def write(self, graph: ProtoGraph) -> onnx.ModelProto:
        """A graph that refers to its tensors in the file, to which those are added that are not there yet."""
        return graph.to_proto(self._refer)

    def _refer(self, tensor: onnx.TensorProto, values: bytes) -> bool:
        if len(values) >= MIN_BYTES:
            refer_to_file(tensor, WEIGHTS, self._place(values), len(values))
        return len(values) >= MIN_BYTES

    def _place(self, data: bytes) -> int:
        digest = hashlib.sha256(data).digest()
        if digest not in self._offsets:
            alignment = PAGE_BYTES if len(data) >= LARGE_BYTES else LINE_BYTES
            self._offsets[digest] = offset = -(-self.nbytes // alignment) * alignment
            self._file.write(bytes(offset - self.nbytes))
            self._file.write(data)
            self.nbytes = offset + len(data)
        return self._offsets[digest]


def _write_graph(proto: onnx.ModelProto, path: Path, folder: Path) -> ExportedModel:
    data = proto.SerializeToString()
    path.write_bytes(data)
    check_graph(path, folder / path.name)
    return describe_file(folder / path.name, proto, len(data))


# A Triton server's model repository


def _move_to_repository(temporary: Path, query: str, file: ExportedModel) -> ExportedModel:
    """Give a written model its folder, with a name of the weights; returns it where it is then."""
    import onnx

    version = temporary / query / "1"
    version.mkdir(parents=True)
    path = version / "model.onnx"
    (temporary / file.path.name).rename(path)
    os.link(temporary / WEIGHTS, version / WEIGHTS)
    model = onnx.load(path, load_external_data=False)
    types = {
        value.name: value.type.tensor_type.elem_type
        for value in (*model.graph.input, *model.graph.output)
    }
    (temporary / query / "config.pbtxt").write_text(triton_config(query, file, types))
    return replace(file, path=file.path.parent / query / "1" / path.name)


def triton_config(name: str, file: ExportedModel, types: Mapping[str, int]) -> str:
    """The config.pbtxt of a model; `types` are TensorProto's numbers by input and output.

    Where the first axis of all of them is open the server joins frames, and leaves that axis out.
    """
    shapes = (*file.inputs.values(), *file.outputs.values())
    joins = file.batch == DYNAMIC and all(shape and isinstance(shape[0], str) for shape in shapes)
    lines = [
        f'name: "{name}"',
        'platform: "onnxruntime_onnx"',
        f"max_batch_size: {MAX_BATCH if joins else 0}",
    ]
    for kind, values in (("input", file.inputs), ("output", file.outputs)):
        for value, shape in values.items():
            sizes = _triton_sizes(shape[1:] if joins else shape)
            lines.append(
                f'{kind} {{ name: "{value}" data_type: TYPE_{_TRITON_TYPES[types[value]]} dims: [{sizes}] }}'
            )
    return "\n".join([*lines, ""])


def _triton_sizes(shape: Shape) -> str:
    return ", ".join(str(size) if isinstance(size, int) and size > 0 else "-1" for size in shape)
