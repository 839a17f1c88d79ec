"""Engines that fail: one that raises on every frame, one that hangs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from tests.edge_runtime.running import Running, adds_up
from tests.edge_runtime.tiny import write_clip
from tests.faults.cameras import HTTP
from tests.faults.queries import FACTORIES, HANG, MOODY, RAISE, bundle
from tests.faults.scenario import Found, Tell

FPS = 10.0
RAISES_S = 6.0
MAX_BACK_S = 15.0
MIN_GOING_ON = 0.9
SUPERVISOR = """
import signal, subprocess, sys
child = None
signal.signal(signal.SIGTERM, lambda number, _: child.send_signal(number))
while (child := subprocess.Popen([sys.executable, "-m", "gemel", "run", "box.yaml"])).wait() not in (0, 2, 130):
    pass
"""
"""A parent that restarts the box, as systemd does."""


def raises(folder: Path, times: int, tell: Tell) -> Found:
    """The engine of one of two queries raises on every frame for a while."""
    mood, keys = _two_queries(folder)
    went_on, tried, paused = [], [], []
    with Running(folder, http=HTTP, **keys) as box:
        for index in range(times):
            box.until(lambda: {one["query"] for one in box.news()} >= {"moody"})
            before, since = _ledgers(box), time.monotonic()
            mood.write_text(RAISE)
            time.sleep(RAISES_S)
            after, took = _ledgers(box), time.monotonic() - since
            mood.unlink()
            went_on.append((after["calm"]["processed"] - before["calm"]["processed"]) / (FPS * took))
            tried.append(after["moody"]["failed"] - before["moody"]["failed"])
            paused.append(after["moody"]["dropped"].get("paused", 0) - before["moody"]["dropped"].get("paused", 0))
            box.news()
            tell(f"{index + 1} of {times}: {tried[-1]} frames tried in {took:.0f} s, {paused[-1]} dropped as paused")
        box.until(lambda: {one["query"] for one in box.news()} >= {"moody"})
        told, ended, summary = box.read_stderr(), box.stop(), box.ledger()
    found = Found(
        f"{times} times for {RAISES_S:.0f} s: the query was tried {max(tried)} times at most, {min(paused)} or more "
        f"frames were dropped while it paused, it came back each time; the other answered {100 * min(went_on):.0f} % "
        "or more of its frames",
        {"tried_most": max(tried), "paused_least": min(paused), "went_on_least": round(min(went_on), 3)},
    )
    found.hold(ended == 0 and adds_up(summary), "the ledger does not add up")
    found.hold(max(tried) <= 3 + RAISES_S, f"it was tried {max(tried)} times")
    found.hold(min(paused) > 0, "it did not pause")
    found.hold(told.count("moody pauses") == times == told.count("moody runs again"), "not every pause was told once")
    found.hold(told.count("a bad mood") <= times, "the same error was told again and again")
    found.in_time(min(went_on) >= MIN_GOING_ON, f"the other answered only {min(went_on):.0%}")
    return found


def hangs(folder: Path, times: int, tell: Tell) -> Found:
    """An engine never returns; its parent starts the box again."""
    mood, keys = _two_queries(folder)
    took, found = [], Found()
    for index in range(times):  # each time a new parent, which would wait the longer the sooner a box ends again
        with Running(folder, "-c", SUPERVISOR, **keys) as box:
            box.news()
            box.until(box.news)
            run = box.results()[-1]["run"]
            mood.write_text(HANG)
            since = time.monotonic()
            box.until(lambda run=run: any(one["run"] != run for one in box.news()))
            took.append(time.monotonic() - since)
            kept = read_ledger(folder / "spool", run)
            answered = sum(one["processed"] for one in kept["ledger"])
            written = sum(one["run"] == run for one in box.results())
            found.hold(adds_up(kept) and "moody has not ended for" in (kept["fault"] or ""), f"fault: {kept['fault']}")
            found.hold(written == answered, f"the ledger tells of {answered} results, {written} were written")
            children = Path(f"/proc/{box.process.pid}/task/{box.process.pid}/children").read_text().split()
            found.hold(box.stop() == 0, "its parent did not end well")
            found.hold(not any(os.path.exists(f"/proc/{child}/fd") for child in children), "a box was left behind")
            tell(f"{index + 1} of {times}: serving again {took[-1]:.1f} s after the hang")
    found.in_time(max(took) <= MAX_BACK_S, f"it served again only after {max(took):.1f} s")
    found.said = (
        f"{times} hangs: {sum(took) / len(took):.1f} s on average and {max(took):.1f} s at most from the hang to the "
        f"next run's first result; the ledger of each run that hung is kept and tells of the results there are"
    )
    found.figures = {"back_s_mean": round(sum(took) / len(took), 2), "back_s_max": round(max(took), 2)}
    return found


def read_ledger(spool: Path, run: str) -> dict[str, Any]:
    """The ledger of an earlier run, which the next one moves aside when it first writes its own."""
    ledgers = [json.loads(path.read_text()) for path in spool.glob("ledger.json*")]
    kept = [ledger for ledger in ledgers if ledger["run"] == run]
    assert kept, f"no ledger of the run {run} is left, only of {[ledger['run'] for ledger in ledgers]}"
    return kept[0]


def _two_queries(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Where the mood of `moody` is written, and the keys of a box of it and of `calm`."""
    mood = folder / "mood"
    write_clip(folder / "c.mp4", 30, FPS)
    bundle(folder, {
        "moody": {"camera": "left", "model": MOODY, "model_args": {"path": str(mood)}}, "calm": {"camera": "right"},
    })  # fmt: skip
    cameras = {name: {"source": "c.mp4", "loop": True} for name in ("left", "right")}
    return mood, {"cameras": cameras, "factories": FACTORIES}


def _ledgers(box: Running) -> dict[str, dict[str, Any]]:
    return {one["id"]: one["ledger"] for one in box.status()["queries"]}
