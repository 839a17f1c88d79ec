"""Engine auto: what is measured, what is left out, and which engine is taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.engines import timing
from edge_runtime.engines.arranging import layouts_for, order_for
from edge_runtime.engines.base import EngineError
from edge_runtime.engines.choosing import Choice, best_of_one_order, fastest, known_fastest
from edge_runtime.engines.eager.engine import TorchEngine
from edge_runtime.engines.preparing import Wish, engines_for, ready_engines
from edge_runtime.engines.registry import make_engine
from edge_runtime.memory.layout import Order, convolutions
from edge_runtime.memory.store import Store
from tests.edge_runtime.engines.paced import only
from tests.edge_runtime.tiny import tiny_bundle

ORDERS = {"torch": frozenset(Order), "compiled": {Order.CHANNELS_LAST, Order.BLOCKED}, "onnx": {Order.STORED}}


@given(
    st.lists(st.dictionaries(st.sampled_from(["compiled", "onnx"]), st.floats(1, 100)), min_size=1, max_size=5),
    st.floats(1, 100),
)
def test_the_choice_is_the_quickest_in_sum_among_those_that_take_one_order(found, torch_ms):
    times = {str(index): {"torch": torch_ms, **one} for index, one in enumerate(found)}
    chosen = best_of_one_order(times, ORDERS)
    assert not {"compiled", "onnx"} <= set(chosen.values())
    sums = [sum(min(one.get(name, torch_ms), torch_ms) for one in times.values()) for name in ("compiled", "onnx")]
    assert sum(times[query][name] for query, name in chosen.items()) == pytest.approx(min(sums))


class Fussy(TorchEngine):
    name = "fussy"
    orders = frozenset({Order.CHANNELS_LAST, Order.BLOCKED})


class Quick(TorchEngine):
    name = "quick"
    orders = frozenset({Order.STORED})

    def ready(self) -> bool:
        return False

    def prepare(self) -> None:
        if self.query.id == "yard":
            raise EngineError("residuals are beyond it")


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    """A bundle, and two engines that can run: torch, and one that refuses the query with a residual."""
    only(monkeypatch, torch=TorchEngine, quick=Quick)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tiny_bundle(tmp_path / "tiny.safetensors")


def test_auto_measures_each_architecture_once_and_takes_the_fastest(bundle, monkeypatch, caplog):
    caplog.set_level("INFO", "gemel.run")
    asked = []

    def measured(_bundle, query, _device, usable):
        asked.append(query)
        return {"torch": 9.0} if query == "yard" else {"torch": 9.0, "quick": 2.0}

    monkeypatch.setattr(timing, "measured", measured)
    assert known_fastest(bundle) is None and not asked, "nothing is known yet, and nothing was measured for that"
    chosen = {"gate": "quick", "yard": "torch", "road": "quick"}
    assert fastest(bundle).engines == chosen
    assert asked == ["gate", "yard"], "road has the architecture of gate"
    assert caplog.text.count("measuring which engine runs") == 2 and "quick 2.0 ms, torch 9.0 ms" in caplog.text
    assert fastest(bundle).engines == chosen and len(asked) == 2
    known = known_fastest(bundle)
    assert known is not None and known.engines == chosen and known.gain == pytest.approx(4.5)
    assert ready_engines(bundle) is None, "the engine was never prepared"
    monkeypatch.setattr(Quick, "ready", lambda _: True)
    ready = ready_engines(bundle)
    assert ready is not None and {query: engine.name for query, engine in ready[0].items()} == chosen


def test_a_choice_says_how_much_it_gains_over_torch_where_it_leaves_it():
    times = {"a": {"torch": 8.0, "quick": 2.0}, "b": {"torch": 4.0, "quick": 4.0}, "c": {"torch": 100.0}}
    assert Choice({"a": "quick", "b": "quick", "c": "torch"}, times).gain == 2.0
    assert Choice({"a": "torch"}, times).gain == Choice({"a": "torch"}).gain == 1.0


def test_what_is_measured_is_real_and_leaves_out_what_cannot_run(bundle):
    found = timing.measured(bundle, "gate", "cpu", ["torch", "quick"])
    assert set(found) == {"torch", "quick"} and min(found.values()) > 0
    assert set(timing.measured(bundle, "yard", "cpu", ["torch", "quick"])) == {"torch"}


def test_whatever_an_engine_fails_with_torch_runs_instead(bundle, monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("no kernel\nfor it")

    monkeypatch.setattr(Quick, "prepare", fails)
    assert {engine.name for engine in engines_for(bundle, "quick").values()} == {"torch"}
    assert r"RuntimeError: no kernel\nfor it; engine torch does" in caplog.text


def test_an_engine_that_cannot_run_a_query_gives_way_to_torch_in_one_line(bundle, caplog):
    caplog.set_level("INFO", "gemel.run")
    engines = engines_for(bundle, "quick")
    assert {query: engine.name for query, engine in engines.items()} == {
        "gate": "quick",
        "yard": "torch",
        "road": "quick",
    }
    assert caplog.text.count("residuals are beyond it; engine torch does") == 1
    assert caplog.text.count("preparing engine quick for") == 3, "said before it begins"


def test_what_overflows_runs_on_torch_and_the_engine_asked_for_says_that_it_cannot(bundle, monkeypatch, caplog):
    overflow = {"gate": frozenset(bundle.names_in_order("gate"))}
    engines = engines_for(bundle, "quick", Wish(overflow=overflow))
    assert {query: engine.name for query, engine in engines.items()} == {
        "gate": "torch",
        "yard": "torch",
        "road": "quick",
    }
    assert caplog.text.count("engine quick cannot run query gate with an overflow; engine torch does") == 1
    monkeypatch.setattr(timing, "measured", lambda *_: {"torch": 9.0, "quick": 2.0})
    monkeypatch.setattr(Quick, "prepare", lambda _: None)
    engines = engines_for(bundle, "auto", Wish(overflow=overflow))
    assert [engine.name for engine in engines.values()] == ["torch", "quick", "quick"]


def test_auto_leaves_out_engines_that_want_weights_arranged_where_weights_come_and_go(bundle, monkeypatch):
    only(monkeypatch, torch=TorchEngine, fussy=Fussy, quick=Quick)
    times = {"torch": 9.0, "fussy": 1.0, "quick": 2.0}
    monkeypatch.setattr(
        timing, "measured", lambda _bundle, _query, _device, usable: {name: times[name] for name in usable}
    )
    assert set(fastest(bundle).engines.values()) == {"fussy"}
    assert set(fastest(bundle, stays=False).engines.values()) == {"quick"}


def test_weights_are_arranged_only_where_every_engine_takes_them_so(bundle):
    kinds = Store.of_bundle(bundle).kinds
    engines = {query.id: make_engine("torch", bundle, query.id) for query in bundle.queries}
    assert order_for(engines.values()) == Order.BLOCKED and order_for(engines.values(), stays=False) == Order.STORED
    fussy, quick = Fussy(bundle, "gate"), Quick(bundle, "gate")
    assert order_for([engines["yard"], fussy], stays=False) == Order.CHANNELS_LAST
    assert order_for([engines["yard"], quick]) == Order.STORED
    assert layouts_for(engines.values(), kinds, Order.STORED) == {}
    last = layouts_for(engines.values(), kinds, Order.CHANNELS_LAST)
    assert last == convolutions(kinds) and all(len(kinds[name][1]) == 4 for name in last)


def test_without_a_private_cache_nothing_is_measured_and_torch_runs(bundle, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert set(fastest(bundle).engines.values()) == {"torch"} and "cannot be used as a cache" in caplog.text
