"""Two tiny architectures in the zoo, a bundle of three queries on them, and tools to damage it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemel.models.bundle import BundleQuery, Made, Manifest, write_bundle
from gemel.models.bundle.format import encode_header, parse_header, place
from gemel.models.preprocess import Preprocess
from gemel.models.zoo.registry import ENTRIES, register

EVIDENCE: Any = {
    "metric": "balanced_accuracy", "split": "test", "samples": 40, "original": 0.9, "merged": 0.88, "ratio": 0.978,
    "proven": True, "lower_end": 0.95,
}  # fmt: skip


class WithNorm(nn.Module):
    """A convolution without bias, a norm, a depthwise convolution, a head."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.depthwise(self.norm(self.conv(x)).relu()).mean((2, 3)))


class WithBias(nn.Module):
    """A convolution with bias, of the shape of the other's, and a head."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=True)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x).relu().mean((2, 3)))


@dataclasses.dataclass
class Sample:
    """A written bundle, the models it was made of and the manifest that came back."""

    path: Path
    models: dict[str, nn.Module]
    queries: list[BundleQuery]
    manifest: Manifest


@pytest.fixture(scope="package", autouse=True)
def tiny_zoo() -> Iterator[None]:
    """`tiny_norm` and `tiny_bias` stand in the zoo while these tests run."""
    for name, factory in (("tiny_norm", WithNorm), ("tiny_bias", WithBias)):
        register(name, task="classification")(lambda num_classes, input_size, factory=factory: factory(num_classes))
    yield
    for name in ("tiny_norm", "tiny_bias"):
        del ENTRIES[name]


def record(query_id: str, model: str, classes: tuple[str, ...] = ("car", "none"), **others: Any) -> BundleQuery:
    """A query's record without tensors."""
    return BundleQuery(
        id=query_id, camera="bridge", task="classification", classes=classes, model=model, model_args={},
        input_size=16, preprocess=Preprocess((16, 16)), fps=5.0, sla_ms=100.0, accuracy_target=0.95, evidence=EVIDENCE,
        **others,
    )  # fmt: skip


def tied_models() -> tuple[dict[str, nn.Module], list[BundleQuery]]:
    """north and south share conv.weight with gate."""
    torch.manual_seed(0)
    models: dict[str, Any] = {"north": WithNorm(2), "south": WithNorm(2), "gate": WithBias(3)}
    for model in models.values():
        model.conv.weight = models["north"].conv.weight
        model.eval()
    models["south"].depthwise.weight = models["north"].depthwise.weight
    queries = [
        record("north", "tiny_norm"),
        record("south", "tiny_norm", roi=(0.0, 8.0, 64.0, 64.0), min_score=0.25, priority=3),
        record("gate", "tiny_bias", ("bus", "car", "none"), threshold=0.4),
    ]
    return models, queries


MADE = Made("yard", "top-down", 700)


def write(path: Path, models: dict[str, nn.Module], queries: list[BundleQuery], **others: Any) -> Manifest:
    """Write with this sample's workload, method and ceiling."""
    return write_bundle(path, models, queries, MADE, **others)


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    """A sound bundle of three queries."""
    models, queries = tied_models()
    path = tmp_path / "yard.safetensors"
    return Sample(path, models, queries, write(path, models, queries))


@pytest.fixture
def writer() -> Callable[..., Manifest]:
    """`write` for tests that make their own bundles."""
    return write


@pytest.fixture
def make_tied() -> Callable[[], tuple[dict[str, nn.Module], list[BundleQuery]]]:
    """`tied_models`, the same each time."""
    return tied_models


Edit = Callable[[dict[str, Any], dict[str, bytes], dict[str, tuple[str, tuple[int, ...]]]], None]


@pytest.fixture
def rewrite() -> Callable[[Path, Edit], None]:
    """Rewrite a bundle as a skilled liar would: tensors laid out afresh, the header sealed again.

    The edit may change the manifest (plain JSON), the bytes by name and (dtype, shape) by name.
    """

    def apply(path: Path, edit: Edit) -> None:
        content = path.read_bytes()
        header = parse_header(content)
        manifest = json.loads(header.metadata["gemel.manifest"])
        data = {entry.name: content[header.data_start :][entry.begin : entry.end] for entry in header.tensors}
        types = {entry.name: (entry.dtype, entry.shape) for entry in header.tensors}
        edit(manifest, data, types)
        entries = place((name, *types[name]) for name in data)
        body = b"".join(data.get(entry.name, bytes(entry.nbytes)) for entry in entries)
        path.write_bytes(encode_header(entries, {"gemel.manifest": json.dumps(manifest)}) + body)

    return apply
