"""Memory settings: the budgets under which methods are compared, and how a size is written."""

from __future__ import annotations

import re

from edge_runtime.schedule.costs import Costs
from models.errors import InputError

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)},
    **{f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)},
}
MAX_BYTES = 2**60
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_BETWEEN = {"50%": 0.5, "75%": 0.75}


def memory_settings(originals: Costs) -> dict[str, int]:
    """The four named budgets in bytes, from the costs of the ORIGINALS and the same for every arm.

    `min` = the largest query alone (weights + workspace); `all` = all weights + the largest workspace; `50%` and
    `75%` = that far from min to all. Weights count as they are resident (each tensor rounded up to 512 bytes), so
    that at `min` the largest query really fits.
    """
    if not originals.queries:
        raise ValueError("memory settings need at least one query")
    least = max(originals.alone_bytes(query) for query in originals.queries)
    names = frozenset[str]().union(*(cost.needed for cost in originals.queries.values()))
    everything = originals.resident_bytes(names) + max(c.workspace_bytes for c in originals.queries.values())
    between = {name: least + round((everything - least) * share) for name, share in _BETWEEN.items()}
    return {"min": least, **between, "all": everything}


def parse_memory(text: str | int, where: str = "memory", key: str = "") -> int:
    """Bytes of a size: `512MiB` (powers of 1024), `2GB` (powers of 1000), plain bytes; InputError otherwise."""
    remedy = "write a size such as 512MiB, 2GB or a number of bytes"
    if isinstance(text, int) and not isinstance(text, bool):
        nbytes = text
    else:
        match = _SIZE.fullmatch(text) if isinstance(text, str) else None
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None:
            raise InputError(where, f"{text!r} is not a size", remedy, key)
        nbytes = int(min(float(match[1]) * unit, MAX_BYTES + 1))
    if nbytes > MAX_BYTES:
        raise InputError(where, f"{str(text)[:40]!r} is more than any memory", remedy, key)
    if nbytes <= 0:
        raise InputError(where, f"{text!r} is not a positive size", remedy, key)
    return nbytes


def memory_bytes(text: str | int, originals: Costs, where: str = "memory", key: str = "") -> int:
    """Bytes of a named setting (`min`, `50%`, `75%`, `all`) or of a size."""
    settings = memory_settings(originals)
    return settings[text] if isinstance(text, str) and text in settings else parse_memory(text, where, key)
