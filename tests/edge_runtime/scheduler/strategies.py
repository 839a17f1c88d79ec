"""Random costs and arrivals for property tests: small numbers, so that sharing, swapping and misses all happen."""

from __future__ import annotations

from hypothesis import strategies as st

from gemel.edge_runtime.scheduler.costs import Costs, QueryCost


@st.composite
def costs(draw: st.DrawFn) -> Costs:
    """Two to five queries over at most ten tensors of up to 40 KiB; loads and runs take milliseconds."""
    names = [f"t{i}" for i in range(draw(st.integers(1, 10)))]
    tensor_bytes = {name: draw(st.integers(1, 40 * 1024)) for name in names}
    queries = {}
    for i in range(draw(st.integers(2, 5))):
        tensors = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        queries[f"q{i}"] = QueryCost(
            tuple(tensors),
            draw(st.integers(1, 40)) / 1000,
            draw(st.integers(0, 8192)),
            draw(st.sampled_from([0.02, 0.05, 0.1, 0.3])),
        )
    return Costs(queries, tensor_bytes, draw(st.sampled_from([1e6, 1e7])), draw(st.sampled_from([0.0, 0.001])))


@st.composite
def budgets(draw: st.DrawFn, of: Costs) -> int:
    """A budget from too small for anything to more than enough for everything."""
    return draw(st.integers(0, of.resident_bytes(list(of.tensor_bytes)) + 16384))


@st.composite
def arrivals(draw: st.DrawFn, of: Costs) -> dict[str, list[float]]:
    """Up to twenty frames a query within one second, at whole milliseconds."""
    times = st.lists(st.integers(0, 1000), max_size=20).map(lambda ms: sorted(t / 1000 for t in ms))
    return {query: draw(times) for query in of.queries}
