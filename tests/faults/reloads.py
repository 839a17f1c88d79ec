"""A box that reloads while it serves: back and forth between two bundles, and wrong files, which it must refuse."""

from __future__ import annotations

import itertools
import json
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.edge_runtime.bad_configs import BAD_CONFIGS
from tests.edge_runtime.running import Running, adds_up
from tests.edge_runtime.tiny import LOOPED, tiny_bundle, write_clip, write_config, write_folder
from tests.faults.cameras import HTTP
from tests.faults.queries import FACTORIES, bundle
from tests.faults.scenario import Found, Tell

FPS = 10.0
TOKEN = "a-token-of-the-faults"
MAX_DRIFT_BYTES = 10e6
SETTLED = 20
"""Reloads before memory is first looked at: allocators grow until they have seen everything a few times."""
REFUSED = "not reloaded, the box serves on unchanged"
BUNDLES = ("a.safetensors", "b.safetensors")


def back_and_forth(folder: Path, times: int, tell: Tell) -> Found:
    """Reload so many times: one query stays as it is, one has another architecture each time, one comes and goes."""
    keys = _write_files(folder)
    seen: set[tuple[str, int]] = set()
    frames: list[int] = []
    held: list[dict[str, int]] = []
    found, took, twice = Found(), [], 0
    with Running(folder, bundle=BUNDLES[0], **keys) as box:
        box.until(box.news)
        for index in range(1, times + 1):
            write_config(folder, bundle=BUNDLES[index % 2], spool="spool", **keys)
            since = time.monotonic()
            answer = _reload(box)
            took.append(time.monotonic() - since)
            found.hold(answer == {"applied": True}, f"reload {index}: {answer}")
            waited = itertools.count()
            while next(waited) < 1000:
                news = box.news()
                for record in news:
                    key = record["query"], record["frame"]
                    twice += key in seen
                    seen.add(key)
                    frames += [record["frame"]] if record["query"] == "stays" else []
                if any(record["query"] == "changes" for record in news):
                    break
                time.sleep(0.01)
            if index in (min(SETTLED, times // 2), times):
                held.append(box.measure_usage())
            if index % 100 == 0:
                tell(f"{index} of {times}: {box.measure_usage()}")
        ended, summary = box.stop(), box.ledger()
    missed = [after - before - 1 for before, after in itertools.pairwise(frames)]
    drift = held[-1]["memory_bytes"] - held[0]["memory_bytes"]
    found.hold(ended == 0 and adds_up(summary), "the ledger does not add up")
    found.hold(summary["reloads"] == {"applied": times, "partly": 0, "refused": 0}, f"reloads: {summary['reloads']}")
    found.hold(not twice, f"{twice} keys of results came twice")
    found.hold(drift < MAX_DRIFT_BYTES, f"memory grew by {drift / 1e6:.1f} MB")
    for name in ("threads", "descriptors"):
        found.hold(held[-1][name] <= held[0][name] + 2, f"{name}: {held[0][name]}, then {held[-1][name]}")
    found.in_time(max(missed) <= 1, f"the query that stayed missed {max(missed)} frames in a row")
    found.figures = {
        "drift_bytes": drift, "gap_frames_max": max(missed), "gaps_over_one": sum(one > 1 for one in missed),
        "reload_s_mean": round(sum(took) / len(took), 3), "reload_s_max": round(max(took), 3),
        "threads_more": held[-1]["threads"] - held[0]["threads"], "keys": len(seen),
    }  # fmt: skip
    found.said = (
        f"{times} reloads, {sum(took) / len(took):.2f} s each on average: memory {drift / 1e6:+.1f} MB, every frame "
        f"accounted for, no key twice; the query that stayed missed {max(missed)} frames in a row at most"
    )
    return found


def refuse_wrong(folder: Path, times: int, tell: Tell) -> Found:
    """Every kind of bad bundle and config, by SIGHUP, and then a good one."""
    tiny_bundle(folder / "tiny.safetensors")
    write_clip(folder / "left.mp4", 12)
    write_folder(folder / "right", 4)
    found, refusals = Found(), 0
    line = ("-m", "gemel", "run", "box.yaml", "--json")
    with (
        open(folder / "summary.json", "wb") as out,
        Running(folder, *line, out=out, cameras=LOOPED, spool=None) as box,
    ):
        good = (folder / "box.yaml").read_text()
        box.until(box.news)
        for index in range(times):
            for name, (spoil, expected) in BAD_CONFIGS.items():
                (folder / "bad.safetensors").unlink(missing_ok=True)
                (folder / "box.yaml").write_text(good)
                spoil(folder)
                box.process.send_signal(signal.SIGHUP)
                refusals += 1
                box.until(lambda count=refusals: box.read_stderr().count(REFUSED) >= count)
                said = [one for one in box.read_stderr().splitlines() if REFUSED in one]
                found.hold(len(said) == refusals and expected in said[-1], f"{name}: {said[-1]}")
                (folder / "box.yaml").write_text(good)
            tell(f"{index + 1} of {times}: {len(BAD_CONFIGS)} kinds")
        served = {one["bundle"] for one in box.results()}
        box.process.send_signal(signal.SIGHUP)
        box.until(lambda: "reloaded" in box.read_stderr().rpartition(REFUSED)[2])
        box.news()
        box.until(box.news)
        ended = box.stop()
    summary = json.loads((folder / "summary.json").read_text())
    found.hold(len(served) == 1, f"bundles {served} served")
    found.hold(summary["reloads"] == {"applied": 1, "partly": 0, "refused": refusals}, f"reloads: {summary['reloads']}")
    found.hold(ended == 0 and adds_up(summary), "the ledger does not add up")
    found.said = (
        f"{len(BAD_CONFIGS)} kinds, {times} times each: {summary['reloads']['refused']} refused with one line each, "
        "the box served on as it was; the next good one was applied"
    )
    found.figures = {"kinds": len(BAD_CONFIGS), "refused": summary["reloads"]["refused"]}
    return found


def _write_files(folder: Path) -> dict[str, Any]:
    """Two bundles, and the keys of a box that serves one of them."""
    write_clip(folder / "c.mp4", 30, FPS)
    (folder / "token").write_text(TOKEN)
    stays = {"camera": "left"}
    bundle(folder, {"stays": stays, "changes": {"camera": "right"}}, BUNDLES[0])
    other = {"camera": "right", "model_args": {"width": 40}}
    bundle(folder, {"stays": stays, "changes": other, "comes": {"camera": "left"}}, BUNDLES[1])
    cameras = {name: {"source": "c.mp4", "loop": True} for name in ("left", "right")}
    return {"cameras": cameras, "factories": FACTORIES, "http": {**HTTP, "token_file": "token"}}


def _reload(box: Running) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    request = urllib.request.Request(f"{box.address()}/api/reload", method="POST", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())
