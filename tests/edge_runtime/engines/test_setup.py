"""Which engine runs which query: by name, by the profile, or torch where nothing else is known or possible."""

from __future__ import annotations

import pytest

from edge_runtime.engines.base import EngineError
from edge_runtime.engines.registry import ENGINES
from edge_runtime.engines.setup import EngineRequest, choose_engines, engines_for, fastest_of_one_format
from edge_runtime.engines.torch_engine import TorchEngine
from edge_runtime.memory.store import WeightFormat
from models.bundle import Bundle
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


@pytest.fixture
def bundle(tmp_path, monkeypatch) -> Bundle:
    """A bundle of three queries; the registry has torch, `quick` and `refusing`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in list(ENGINES):
        monkeypatch.delitem(ENGINES, name)
    for kind in (TorchEngine, Quick, Refusing):
        monkeypatch.setitem(ENGINES, kind.name, (kind.__module__, kind.__qualname__))
    return tiny_bundle(tmp_path / "tiny.safetensors")


def names(bundle: Bundle, *args, **options) -> list[str]:
    return [engine.name for engine in engines_for(bundle, *args, **options).values()]


def test_engines_for_auto_follows_the_profile_and_is_torch_without_one(bundle):
    assert names(bundle, "auto") == ["torch"] * 3
    profiled = {"gate": "quick", "road": "torch", "yard": "gone"}
    engines = engines_for(bundle, "auto", profiled=profiled)
    assert {query: engine.name for query, engine in engines.items()} == {
        **dict.fromkeys(QUERIES, "torch"),
        "gate": "quick",
    }


def test_engines_for_auto_where_weights_come_and_go_takes_no_format_that_is_slow_to_load(bundle):
    profiled = dict.fromkeys(QUERIES, "quick")
    assert names(bundle, "auto", EngineRequest(stays=False), profiled) == ["torch"] * 3
    assert names(bundle, "quick", EngineRequest(stays=False)) == ["quick"] * 3, "a named engine is used all the same"


def test_engines_for_overflow_or_lower_precision_is_torch(bundle, caplog):
    request = EngineRequest(overflow={"road": bundle.names_in_order("road")[:1]})
    engines = engines_for(bundle, "quick", request)
    assert {query: engine.name for query, engine in engines.items()} == {
        "gate": "quick",
        "road": "torch",
        "yard": "quick",
    }
    assert "engine quick cannot run query road with an overflow" in caplog.text
    assert names(bundle, "quick", EngineRequest(precision="bf16")) == ["torch"] * 3


def test_engines_for_engine_that_cannot_run_falls_back_with_one_warning(bundle, caplog):
    assert names(bundle, "refusing") == ["torch"] * 3
    assert caplog.text.count("no tools; engine torch does") == 1


def test_choose_engines_measures_one_architecture_once_and_leaves_out_refusing_engines(bundle, caplog):
    caplog.set_level("INFO", "gemel.run")
    chosen = choose_engines(bundle)
    assert set(chosen) == set(QUERIES) and set(chosen.values()) <= {"torch", "quick"}
    measured = [record.message for record in caplog.records if record.message.startswith("one frame of")]
    assert len(measured) == len({query.model + str(dict(query.model_args)) for query in bundle.queries})


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
