"""Which engine runs which query: by name, by the profile, or torch where nothing else is known or possible."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gemel.edge_runtime.engines import layouts
from gemel.edge_runtime.engines.base import ENGINES, EngineError
from gemel.edge_runtime.engines.layouts import common_format
from gemel.edge_runtime.engines.setup import EngineRequest, are_paged, engines_for
from gemel.edge_runtime.engines.torch_engine import TorchEngine
from gemel.edge_runtime.memory.binding import WeightFormat
from gemel.models.bundle import Bundle
from tests.edge_runtime.tiny import tiny_bundle

STORED, LAST = WeightFormat.STORED, WeightFormat.CHANNELS_LAST
QUERIES = ("gate", "road", "yard")


class Quick(TorchEngine):
    name = "quick"
    formats = frozenset({LAST})


class Refusing(TorchEngine):
    name = "refusing"

    def prepare(self) -> None:
        raise EngineError("no tools")


class Hungry(TorchEngine):
    name = "hungry"

    def prepare(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture
def register(monkeypatch):
    """Registers engines beside the real ones."""

    def add(*kinds: type[TorchEngine]) -> None:
        for kind in kinds:
            monkeypatch.setitem(ENGINES.added, kind.name, kind)

    add(Quick, Refusing)
    return add


@pytest.fixture
def bundle(tmp_path, monkeypatch, register) -> Bundle:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tiny_bundle(tmp_path / "tiny.safetensors")


def names(bundle: Bundle, *args, **options) -> dict[str, str]:
    return {query: engine.name for query, engine in engines_for(bundle, *args, **options).items()}


def test_engines_for_auto_is_torch_for_a_bundle_without_networks(bundle, caplog):
    caplog.set_level("INFO", "gemel.run")
    assert names(bundle, "auto") == dict.fromkeys(QUERIES, "torch")
    assert "holds no networks" in caplog.text


def test_engines_for_a_damaged_query_on_mapped_weights_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sound = tiny_bundle(tmp_path / "sound.safetensors", documents=True)
    found = engines_for(sound, "auto", EngineRequest(damaged=("road",)))
    assert {query: engine.name for query, engine in found.items()} == {
        "gate": "onnx", "yard": "onnx", "road": "none",
    }  # fmt: skip
    assert are_paged(found.values()) and not found["road"].weights
    with pytest.raises(EngineError, match="damaged"):
        found["road"].run([np.zeros((8, 8, 3), np.uint8)])


def test_common_format_of_weights_that_come_and_go_is_quick_to_load(bundle, monkeypatch):
    engine = TorchEngine(bundle, "gate")
    assert common_format([engine], stays=False) == STORED
    monkeypatch.setattr(layouts, "arrives_reordered", lambda _: True)
    assert common_format([engine], stays=False) == LAST


def test_engines_for_overflow_or_lower_precision_is_torch(bundle):
    request = EngineRequest(overflow={"road": bundle.names_in_order("road")[:1]})
    assert names(bundle, "quick", request) == {"gate": "quick", "road": "torch", "yard": "quick"}
    options = {"precision": "bf16"}
    assert names(bundle, "auto", EngineRequest(options=options)) == dict.fromkeys(QUERIES, "torch")
    assert names(bundle, "quick", EngineRequest(options=options)) == dict.fromkeys(QUERIES, "quick")


@pytest.mark.parametrize(("kind", "reason"), [(Refusing, "no tools"), (Hungry, "CUDA out of memory")])
def test_engines_for_engine_that_cannot_run_falls_back_with_a_warning(bundle, register, caplog, kind, reason):
    register(kind)
    assert names(bundle, kind.name) == dict.fromkeys(QUERIES, "torch")
    assert f"{reason}; engine torch does" in caplog.text
