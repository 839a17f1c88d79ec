"""Which engine runs which query: by name, by the profile, or torch where nothing else is known or possible."""

from __future__ import annotations

import pytest
import torch

from edge_runtime.engines import setup
from edge_runtime.engines.base import EngineError
from edge_runtime.engines.onnx import TensorrtEngine
from edge_runtime.engines.registry import ENGINES, engine_class
from edge_runtime.engines.setup import (
    EngineRequest,
    choose_engines,
    common_format,
    engines_for,
    fastest_of_one_format,
    measure_engines,
)
from edge_runtime.engines.torch_engine import TorchEngine
from edge_runtime.memory.store import WeightFormat
from models.bundle import Bundle
from models.errors import InputError
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


class HungryInRuns(TorchEngine):
    name = "hungry"

    def forward(self, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture
def register(monkeypatch):
    """Registers engines in place of the real ones."""

    def replace(*kinds: type[TorchEngine]) -> None:
        for name in list(ENGINES):
            monkeypatch.delitem(ENGINES, name)
        for kind in kinds:
            monkeypatch.setitem(ENGINES, kind.name, (kind.__module__, kind.__qualname__))

    replace(TorchEngine, Quick, Refusing)
    return replace


@pytest.fixture
def bundle(tmp_path, monkeypatch, register) -> Bundle:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tiny_bundle(tmp_path / "tiny.safetensors")


def names(bundle: Bundle, *args, **options) -> dict[str, str]:
    return {query: engine.name for query, engine in engines_for(bundle, *args, **options).items()}


def test_engines_for_auto_follows_the_profile_and_is_torch_without_one(bundle):
    alone = dict.fromkeys(QUERIES, "torch")
    assert names(bundle, "auto") == alone
    profiled = {"gate": "quick", "road": "torch", "yard": "gone"}
    assert names(bundle, "auto", profiled=profiled) == {**alone, "gate": "quick"}


def test_engines_for_auto_where_weights_come_and_go_takes_no_format_that_is_slow_to_load(bundle, monkeypatch):
    profiled, request, engine = dict.fromkeys(QUERIES, "quick"), EngineRequest(stays=False), TorchEngine(bundle, "gate")
    assert names(bundle, "auto", request, profiled) == dict.fromkeys(QUERIES, "torch")
    assert names(bundle, "quick", request) == profiled, "a named engine is used all the same"
    assert common_format([engine], stays=False) == STORED
    monkeypatch.setattr(setup, "arrives_reordered", lambda _: True)
    assert common_format([engine], stays=False) == LAST and names(bundle, "auto", request, profiled) == profiled


def test_engines_for_overflow_or_lower_precision_is_torch(bundle, caplog):
    request = EngineRequest(overflow={"road": bundle.names_in_order("road")[:1]})
    assert names(bundle, "quick", request) == {"gate": "quick", "road": "torch", "yard": "quick"}
    assert "engine quick cannot run query road with an overflow" in caplog.text
    assert names(bundle, "quick", EngineRequest(precision="bf16")) == dict.fromkeys(QUERIES, "torch")


@pytest.mark.parametrize(("kind", "reason"), [(Refusing, "no tools"), (Hungry, "CUDA out of memory")])
def test_engines_for_engine_that_cannot_run_falls_back_with_one_warning(bundle, register, caplog, kind, reason):
    register(TorchEngine, kind)
    assert names(bundle, kind.name) == dict.fromkeys(QUERIES, "torch")
    assert caplog.text.count(f"{reason}; engine torch does") == 1


def test_choose_engines_measures_one_architecture_once_and_leaves_out_refusing_engines(bundle, caplog):
    caplog.set_level("INFO", "gemel.run")
    chosen = choose_engines(bundle)
    assert set(chosen) == set(QUERIES) and set(chosen.values()) <= {"torch", "quick"}
    measured = [record.message for record in caplog.records if record.message.startswith("one frame of")]
    assert len(measured) == len({query.model + str(dict(query.model_args)) for query in bundle.queries})


def test_choose_engines_of_torch_alone_measures_nothing(bundle, register, monkeypatch):
    monkeypatch.setattr(TensorrtEngine, "missing", classmethod(lambda cls, device: None))
    register(TorchEngine, TensorrtEngine)  # never run, so never chosen
    monkeypatch.setattr(setup, "measure_engines", None)
    assert set(choose_engines(bundle).values()) == {"torch"} and engine_class("tensorrt") is TensorrtEngine


def test_measure_engines_without_memory_for_one_leaves_it_out(bundle, register, caplog):
    caplog.set_level("INFO", "gemel.run")
    register(TorchEngine, HungryInRuns)
    assert set(measure_engines(bundle, "gate", "cpu", ["torch", "hungry"])) == {"torch"}
    assert "engine hungry cannot run" in caplog.text


def test_measure_engines_without_memory_for_torch_is_refused(bundle, register, monkeypatch):
    monkeypatch.setattr(HungryInRuns, "name", "torch")
    register(HungryInRuns, Quick)
    with pytest.raises(InputError, match="could not be measured"):
        choose_engines(bundle)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"a": {"torch": 3.0, "quick": 1.0, "plain": 2.0}}, ["quick"]),
        ({"a": {"torch": 3.0, "plain": 2.0}}, ["plain"]),
        ({"a": {"torch": 9.0, "quick": 1.0, "plain": 2.0}, "b": {"torch": 9.0, "plain": 2.0}}, ["plain", "plain"]),
        ({"a": {"torch": 9.0, "quick": 1.0, "plain": 8.0}, "b": {"torch": 3.0, "plain": 2.0}}, ["quick", "torch"]),
    ],
)
def test_fastest_of_one_format_takes_the_format_with_the_smaller_sum(times, expected):
    formats = {"torch": {STORED, LAST}, "quick": {LAST}, "plain": {STORED}}
    assert list(fastest_of_one_format(times, formats).values()) == expected
