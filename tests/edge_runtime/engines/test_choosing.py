from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.engines import EngineError, choosing, make_engine
from edge_runtime.engines.arranging import layouts_for, order_for
from edge_runtime.engines.choosing import best_of_one_order, engines_for, fastest
from edge_runtime.engines.eager.engine import TorchEngine
from edge_runtime.memory.layout import Order, convolutions
from edge_runtime.memory.store import Store
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
    monkeypatch.setattr(choosing, "ENGINES", {"torch": (), "quick": ()})
    known = {"torch": TorchEngine, "quick": Quick}
    monkeypatch.setattr(choosing, "engine_named", known.__getitem__)
    monkeypatch.setattr(choosing, "make_engine", lambda name, *args, **options: known[name](*args, **options))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tiny_bundle(tmp_path / "tiny.safetensors")


def test_auto_measures_each_architecture_once_and_takes_the_fastest(bundle, monkeypatch, caplog):
    caplog.set_level("INFO", "gemel.run")
    asked = []

    def measured(_bundle, query, _device, usable):
        asked.append(query)
        return {"torch": 9.0} if query == "yard" else {"torch": 9.0, "quick": 2.0}

    monkeypatch.setattr(choosing, "_measured", measured)
    assert fastest(bundle) == {"gate": "quick", "yard": "torch", "road": "quick"}
    assert asked == ["gate", "yard"], "road has the architecture of gate"
    assert caplog.text.count("measuring which engine runs") == 2 and "quick 2.0 ms, torch 9.0 ms" in caplog.text
    assert fastest(bundle) == {"gate": "quick", "yard": "torch", "road": "quick"} and len(asked) == 2


def test_what_is_measured_is_real_and_leaves_out_what_cannot_run(bundle):
    found = choosing._measured(bundle, "gate", "cpu", ["torch", "quick"])
    assert set(found) == {"torch", "quick"} and min(found.values()) > 0
    assert set(choosing._measured(bundle, "yard", "cpu", ["torch", "quick"])) == {"torch"}


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


def test_what_streams_runs_on_torch_and_the_engine_asked_for_says_that_it_cannot(bundle, monkeypatch, caplog):
    streamed = {"gate": frozenset(bundle.names_in_order("gate"))}
    engines = engines_for(bundle, "quick", streamed=streamed)
    assert {query: engine.name for query, engine in engines.items()} == {
        "gate": "torch",
        "yard": "torch",
        "road": "quick",
    }
    assert caplog.text.count("engine quick cannot stream the weights of query gate; engine torch does") == 1
    monkeypatch.setattr(choosing, "_measured", lambda *_: {"torch": 9.0, "quick": 2.0})
    monkeypatch.setattr(Quick, "prepare", lambda _: None)
    engines = engines_for(bundle, "auto", streamed=streamed)
    assert [engine.name for engine in engines.values()] == ["torch", "quick", "quick"]


def test_auto_leaves_out_engines_that_want_weights_arranged_where_weights_come_and_go(bundle, monkeypatch):
    monkeypatch.setattr(choosing, "ENGINES", {"torch": (), "fussy": (), "quick": ()})
    monkeypatch.setattr(choosing, "engine_named", {"torch": TorchEngine, "fussy": Fussy, "quick": Quick}.__getitem__)
    times = {"torch": 9.0, "fussy": 1.0, "quick": 2.0}
    monkeypatch.setattr(
        choosing, "_measured", lambda _bundle, _query, _device, usable: {name: times[name] for name in usable}
    )
    assert set(fastest(bundle).values()) == {"fussy"}
    assert set(fastest(bundle, stays=False).values()) == {"quick"}


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
    assert set(fastest(bundle).values()) == {"torch"} and "cannot be used as a cache" in caplog.text
