"""A bound on frames in time that no schedule can beat, however well it knows the future.

Let T be the seconds from the first capture to the last deadline, and for any schedule whatever, over all that time:
x_q the frames of query q that were in time, s_t the seconds for which tensor t was resident, and m_t how often it was
loaded. The box starts empty, so t was resident in m_t intervals at most. Then

- every tensor t of q was resident when a frame of q ran. A frame that began to run within an interval of length D was
  captured in it, or before it by no more than p_q = sla_q - run_q(1), else it would be late. Frames come evenly, fps_q
  a second, so these are at most fps_q (D + p_q) + 1, and over all intervals x_q <= fps_q s_t + (fps_q p_q + 1) m_t;
- memory holds no more than the budget at any moment: the sum of footprint_t s_t is at most budget T, and s_t <= T;
- loads and runs do not overlap. A load of t takes bytes_t / rate at least, and a frame of q takes at least
  r_q = min over b of run_q(b) / b, over the batches b whose frames can all be in time: the newest of b frames comes
  (b - 1) / fps_q after the oldest, and the run must still end within the oldest one's SLA. So the sum of
  x_q r_q + m_t bytes_t / rate is at most T;
- no more frames run than arrive; none of a query that cannot run in time, or that does not fit the budget alone.

The most that the sum of x_q can be under these, with fractions allowed, is a linear program, and the bound. It knows
neither the order of frames nor workspaces, so it may lie well above what can be reached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import lil_matrix

from gemel.edge_runtime.scheduler.costs import Costs, QueryCost


def upper_bound(
    costs: Costs, arrivals: Mapping[str, Sequence[float]], fps: Mapping[str, float], budget_bytes: int
) -> float:
    """The most frames in time that any schedule could reach; `fps` are the (highest) rates at which frames come."""
    possible = {
        query: cost
        for query, cost in costs.queries.items()
        if arrivals.get(query) and cost.run_s <= cost.sla_s and costs.alone_bytes(query) <= budget_bytes
    }
    if not possible:
        return 0.0
    first = min(times[0] for times in arrivals.values() if times)
    total_s = max(arrivals[query][-1] + cost.sla_s for query, cost in possible.items()) - first
    queries = list(possible)
    tensors = sorted(set().union(*(cost.needed for cost in possible.values())))
    count = len(queries)
    stays = {name: count + index for index, name in enumerate(tensors)}
    loads = {name: count + len(tensors) + index for index, name in enumerate(tensors)}
    width = count + 2 * len(tensors)
    height = sum(len(cost.needed) for cost in possible.values()) + 2
    rows, limits = lil_matrix((height, width)), np.zeros(height)
    row = 0
    for index, (query, cost) in enumerate(possible.items()):
        for name in cost.needed:
            rows[row, index] = 1.0
            rows[row, stays[name]] = -fps[query]
            rows[row, loads[name]] = -(fps[query] * (cost.sla_s - cost.run_s) + 1)
            row += 1
        rows[-1, index] = least_s(cost, fps[query])
    for name in tensors:
        rows[-2, stays[name]] = costs.footprints[name] / max(1, budget_bytes)
        rows[-1, loads[name]] = costs.tensor_bytes[name] / costs.copy_bytes_per_s
    limits[-2:] = total_s
    gains = np.zeros(width)
    gains[:count] = -1.0
    bounds = [(0, len(arrivals[query])) for query in queries]
    bounds += [(0, total_s)] * len(tensors) + [(0, None)] * len(tensors)
    found = linprog(gains, A_ub=rows.tocsr(), b_ub=limits, bounds=bounds, method="highs")
    if not found.success:
        raise RuntimeError(f"the bound could not be computed: {found.message}")
    return float(-found.fun)


def least_s(cost: QueryCost, fps: float) -> float:
    """The least time per frame of any batch whose frames can all be in time."""
    batches = [
        count for count in range(1, cost.largest + 1) if (count - 1) / fps + cost.run_of(count) <= cost.sla_s + 1e-9
    ]
    return min((cost.run_of(count) / count for count in batches), default=cost.run_s)
