"""Bundles for the tests of engines: any model as any query, and a network that attends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from gemel.edge_runtime.engines.base import FrameEngine
from gemel.edge_runtime.memory.arena import Arena
from gemel.edge_runtime.memory.store import Layouts, Store
from gemel.models import zoo
from gemel.models.bits import Bits
from gemel.models.bundle import Bundle, BundleQuery, Made, open_bundle, write_bundle
from gemel.models.export.export_document import export_documents
from gemel.models.preprocess import InputSize, Preprocess, height_width
from gemel.models.quantization import PackedWeight, choices, pack
from gemel.models.tensors import normalise_frames
from tests.edge_runtime import tiny

ATTENDING = "tests.edge_runtime.engines.sample_bundles:Attending"
BRANCHING = "tests.edge_runtime.engines.sample_bundles:Branching"
CLASSES = ("a", "b", "c")


class Branch(nn.Module):
    """A module with a weight of its own, used before its children and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale_weight = nn.Parameter(torch.rand(1, 3, 32, 32))
        self.widen, self.narrow = nn.Conv2d(3, 32, 7, padding=3), nn.Conv2d(32, 3, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, 32, 32) -> the same."""
        return self.narrow(self.widen(x * self.scale_weight).relu()) * self.scale_weight


class Branching(nn.Sequential):
    """Three branches, one after the other."""

    def __init__(self, num_classes: int, input_size: int = 32) -> None:
        super().__init__(Branch(), Branch(), Branch(), nn.Flatten(), nn.Linear(3 * 32 * 32, num_classes))


class Attending(nn.Module):
    """A module with a weight of its own around one that reads its child's weights, and a layer called twice."""

    def __init__(self, num_classes: int, input_size: int = 16) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 64, 8, 8)
        self.start_weight = nn.Parameter(torch.randn(4, 64) / 8)
        self.attention = nn.MultiheadAttention(64, 2, batch_first=True)
        self.norm = nn.LayerNorm(64)
        self.mix = nn.Linear(64, 64)
        self.head = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, 16, 16) -> (N, C)."""
        x = self.patch(x).flatten(2).transpose(1, 2) + self.start_weight
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(self.mix(self.mix(x)).mean(1))


FACTORIES = {ATTENDING: Attending, BRANCHING: Branching}


def build_model(name: str, size: InputSize, seed: int = 0) -> nn.Module:
    """A model, in eval mode, whose biases and statistics all matter."""
    torch.manual_seed(seed)
    detects = name in zoo.names("detection")
    model = (
        FACTORIES[name](len(CLASSES))
        if name in FACTORIES
        else zoo.build(name, CLASSES, {}, size, "detection" if detects else "classification")
    )
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.is_floating_point() and tensor.ndim == 1:
                tensor.copy_(torch.rand(tensor.shape) * 0.8 + (0.6 if key.endswith(("var", "weight")) else -0.3))
    return model.eval()


def make_query(query_id: str, model: str, size: InputSize, **keys) -> BundleQuery:
    task = "detection" if model in zoo.names("detection") else "classification"
    keys = {"task": task, "classes": CLASSES, "preprocess": Preprocess(height_width(size)), **keys}
    return tiny.query(query_id, "left", model=model, input_size=size, **keys)


def pack_weights(model: nn.Module, bits: Bits, least: bool = False) -> dict[str, PackedWeight]:
    """The weights that a merge would pack; with `least` every one of two dimensions or more, however small."""
    packed = {}
    for key, tensor in model.state_dict().items():
        shape = (*tensor.shape[:1], 10**6) if least and tensor.ndim > 1 else tensor.shape
        if found := choices(key, shape, bits):
            packed[key] = pack(tensor, found[0])
    return packed


def write_and_open(
    path: Path,
    models: Mapping[str, nn.Module],
    queries: list[BundleQuery],
    packed: dict[str, dict[str, PackedWeight]] | None = None,
    documents: bool = False,
) -> Bundle:
    ready = {name: model.eval() for name, model in models.items()}
    graphs = export_documents(ready, queries) if documents else {}
    write_bundle(path, ready, queries, Made("w", "none", 0), packed=packed, documents=graphs)
    return open_bundle(path, [query.model for query in queries if ":" in query.model])


def bind(engine: FrameEngine, bundle: Bundle, arena: Arena | None = None, layouts: Layouts = ()) -> Arena:
    """Bind an engine to an arena of the bundle's size, in which all its tensors are resident."""
    names = bundle.names_in_order(engine.query.id)
    if arena is None:
        store = Store.of_bundle(bundle)
        arena = Arena(store, max(extent.end for extent in store.extents.values()), layouts=layouts)
    arena.change((), names)
    arena.bind(engine, names)
    return arena


def reference(bundle: Bundle, query_id: str, seed: int) -> Tensor:
    """What the model built whole from the bundle returns for a picture."""
    query, frame = bundle.query(query_id), tiny.picture(seed)
    if query.roi is not None:
        x0, y0, x1, y1 = map(int, query.roi)
        frame = frame[y0:y1, x0:x1]
    with torch.inference_mode():
        pictures = torch.from_numpy(query.preprocess.resize_frame(frame)[None])
        return bundle.build(query_id)(normalise_frames(query.preprocess, pictures))
