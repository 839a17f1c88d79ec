"""Which sessions are used: those that save most time for their bytes, as long as all other weights stay resident."""

from __future__ import annotations

import pytest

from edge_runtime.scheduler.costs import BatchCost, Costs, QueryCost, all_bytes
from edge_runtime.scheduler.sessions import SessionCost, pick_sessions, with_sessions

MIB = 2**20
COSTS = Costs(
    {
        "a": QueryCost.of_batches(("shared", "own a"), 1.0, (BatchCost(1, 0.030, MIB),)),
        "b": QueryCost.of_batches(("shared", "own b"), 1.0, (BatchCost(1, 0.030, MIB),)),
        "c": QueryCost.of_batches(("shared",), 1.0, (BatchCost(1, 0.020, MIB),)),
    },
    {"shared": 40 * MIB, "own a": MIB, "own b": MIB},
    1e9,
)


def session(engine: str, nbytes: int, run_s: float, *queries: str) -> SessionCost:
    return SessionCost(engine, nbytes, dict.fromkeys(queries, (BatchCost(1, run_s, 2 * MIB),)))


PAIR = session("onnx", 45 * MIB, 0.015, "a", "b")
ALONE = session("onnx", 41 * MIB, 0.015, "c")
SLOW = session("onnx", 41 * MIB, 0.025, "c")
FASTER = session("openvino", 50 * MIB, 0.010, "a", "b")


def test_with_sessions_frees_tensors_that_only_their_queries_need():
    costs = with_sessions(COSTS, [PAIR])
    assert costs.tensor_bytes == {"shared": 40 * MIB} and costs.queries["a"].run_s == 0.015
    assert all_bytes(costs) == 42 * MIB and not costs.queries["b"].tensors


@pytest.mark.parametrize(
    ("sessions", "budget", "expected"),
    [
        ([PAIR, ALONE], 200, [PAIR, ALONE]),
        ([PAIR, ALONE], 87, [PAIR]),
        ([PAIR, ALONE], 86, [ALONE]),
        ([PAIR, ALONE], 84, []),
        ([SLOW], 200, []),
        ([PAIR, FASTER], 200, [FASTER]),
        ([PAIR, FASTER], 90, [PAIR]),
    ],
)
def test_pick_sessions_takes_the_fastest_that_fit_beside_all_others(sessions, budget, expected):
    assert list(pick_sessions(COSTS, sessions, budget * MIB)) == expected
