"""More work than the box can do."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.edge_runtime.running import Running, adds_up, total
from tests.edge_runtime.tiny import write_clip
from tests.faults.cameras import HTTP, SIZE
from tests.faults.queries import BUSY, FACTORIES, bundle
from tests.faults.scenario import Found, Tell

TIMES, QUERIES, FPS, SLA_MS = 4, 8, 25.0, 500.0
MAX_LATE, MAX_WAITING_BYTES, DEPTH = 0.01, 256 * 2**20, 8
FIRST_SIZE, TRY_S, MAX_TRIES = 64, 4.0, 6


def overload(folder: Path, seconds: int, tell: Tell) -> Found:
    """Queries ask for four times what the box can do."""
    names = [f"q{index}" for index in range(QUERIES)]
    write_clip(folder / "c.mp4", 50, FPS, size=SIZE)
    size = _size(folder, names)
    tell(f"pictures of {size} pixels")
    _write(folder, names, size)
    pending: list[int] = []
    with Running(folder, cameras=_cameras(names), late="publish", factories=FACTORIES, http=HTTP) as box:
        box.until(lambda: {one["query"] for one in box.results()} == set(names))
        box.news()
        began = time.time()
        while (passed := time.time() - began) < seconds:
            status = box.status()
            pending += [one["ledger"]["pending"] for one in status["queries"]]
            time.sleep(0.5)
            tell(f"{passed:.0f} of {seconds} s")
        records = [one for one in box.news() if one["captured_at"] >= began]
        ended, summary = box.stop(), box.ledger()
    half = began + passed / 2
    ages = [[one["age_ms"] for one in records if (one["captured_at"] < half) == early] for early in (True, False)]
    early, late = (sum(one) / max(1, len(one)) for one in ages)
    share = sum(one["late"] for one in records) / max(1, len(records))
    times = total(summary, "received") / max(1, total(summary, "processed"))
    found = Found(
        f"{seconds} s at {times:.1f} times: {100 * share:.2f} % of {len(records):,} results late; mean age {early:.0f} "
        f"ms in the first half, {late:.0f} ms in the second; at most {max(pending)} frames of a query and "
        f"{summary['max_waiting_bytes'] / 2**20:.0f} MiB waited; received = processed + dropped + failed + pending",
        {"times": round(times, 2), "results": len(records), "late_share": round(share, 4), "age_ms": [early, late],
         "most_pending": max(pending), "max_waiting_bytes": summary["max_waiting_bytes"]},
    )  # fmt: skip
    found.hold(ended == 0 and adds_up(summary), "the ledger does not add up")
    found.hold(max(pending) <= 2 * DEPTH, f"{max(pending)} frames of a query waited")  # those being run, too
    found.hold(summary["max_waiting_bytes"] <= MAX_WAITING_BYTES, "too many pictures waited")
    found.hold(records and max(pending) > 0, "nothing was published")
    found.in_time(share <= MAX_LATE, f"{share:.2%} of the results were late")
    found.in_time(late <= 1.2 * early + 20, f"the lag grew from {early:.0f} to {late:.0f} ms")
    return found


def _size(folder: Path, names: list[str]) -> int:
    """How large a picture must be so that all ask for so many times what can be done, by short runs of the box."""
    size = FIRST_SIZE
    for _ in range(MAX_TRIES):
        _write(folder, names, size)
        with Running(folder, cameras=_cameras(names), factories=FACTORIES, http=HTTP) as box:
            box.until(box.results)
            time.sleep(TRY_S)
            box.stop()
            times = total(box.ledger(), "received") / max(1, total(box.ledger(), "processed"))
        (folder / "results.jsonl").unlink()
        if times >= TIMES:
            break
        size = round(size * (1.1 * TIMES / times) ** 0.5) + 1
    return size


def _write(folder: Path, names: list[str], size: int) -> None:
    keys: dict[str, Any] = {"model": BUSY, "input_size": size, "sla_ms": SLA_MS}
    bundle(folder, {name: {"camera": name, **keys} for name in names})


def _cameras(names: list[str]) -> dict[str, Any]:
    return {name: {"source": "c.mp4", "loop": True} for name in names}
