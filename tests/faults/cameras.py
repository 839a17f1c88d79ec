"""Faults of cameras: one that drops, one of many that is of no use, one whose video is damaged."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.edge_runtime.capture.faulty_cameras import RtspCamera
from tests.edge_runtime.running import Running, adds_up, total
from tests.edge_runtime.tiny import write_clip
from tests.faults.queries import FACTORIES, one_each
from tests.faults.scenario import Found, Tell

SIZE, OTHER_SIZE = (352, 288), (176, 144)
WARM_DROPS = 4
AWAY_S = (0.0, 0.5, 2.0, 6.0)
MAX_BACK_S, MAX_BYTES = 2.0, 5_000_000
CAMERAS, ASKED_FPS = 16, 5.0
MAX_LOST, MAX_START_S = 0.01, 10.0
DAMAGE_S = 0.6
CLIPS_AT_ONCE = 8
HTTP = {"bind": "127.0.0.1:0"}


def drops(folder: Path, times: int, tell: Tell) -> Found:
    """A camera is cut off and refuses, and comes back after a while."""
    one_each(folder, ["c"])
    took: list[float] = []
    with RtspCamera(size=SIZE) as camera, Running(
        folder, cameras={"c": {"source": camera.url, "timeout_s": 2}}, factories=FACTORIES
    ) as box:  # fmt: skip
        before: dict[str, int] = {}
        for index in range(WARM_DROPS + times):
            box.until(box.news)
            if index == WARM_DROPS:
                before = box.measure_usage()
            camera.refuse()
            time.sleep(AWAY_S[index % len(AWAY_S)])
            camera.listen()
            returned = time.time()
            box.until(lambda since=returned: any(one["captured_at"] > since for one in box.news()))
            took.append(time.time() - returned)
            tell(f"{len(took)} of {WARM_DROPS + times} drops")
        after = box.measure_usage()
        with contextlib.suppress(AssertionError):  # what is just being let go
            box.until(lambda: all(box.measure_usage()[one] <= before[one] for one in ("threads", "descriptors")), 5)
            after = box.measure_usage()
        told = box.read_stderr()
        ended, summary = box.stop(), box.ledger()
    more = {name: after[name] - before[name] for name in before}
    found = Found(
        f"{times} drops of 0 to 6 s: back after {sum(took) / len(took):.2f} s on average, {max(took):.2f} s at most; "
        f"memory {more['memory_bytes'] / 1e6:+.1f} MB, threads {more['threads']:+d}, "
        f"descriptors {more['descriptors']:+d}",
        {"back_s_mean": round(sum(took) / len(took), 3), "back_s_max": round(max(took), 3), **more},
    )
    found.in_time(max(took) <= MAX_BACK_S, f"it was back only after {max(took):.2f} s")
    found.hold(more["memory_bytes"] < MAX_BYTES, f"{more['memory_bytes']} bytes more are held")
    found.hold(more["threads"] <= 0 and more["descriptors"] <= 0, f"more is held: {more}")
    found.hold(told.count("is away") == WARM_DROPS + times == told.count("is back"), "not every drop was told once")
    found.hold("secret" not in told, "its password was told")
    found.hold(ended == 0 and adds_up(summary), "the ledger does not add up")
    return found


def hangs(folder: Path, times: int, tell: Tell) -> Found:
    """One of 16 cameras goes on without sending anything."""
    return _beside(folder, times, "muted", tell)


def silent(folder: Path, times: int, tell: Tell) -> Found:
    """One of 16 cameras does not answer from the start."""
    return _beside(folder, times, "silent", tell)


def garbage(folder: Path, times: int, tell: Tell) -> Found:
    """One of 16 cameras sends random bytes."""
    return _beside(folder, times, "garbage", tell)


def _beside(folder: Path, seconds: int, fault: str, tell: Tell) -> Found:
    names = [f"c{index}" for index in range(CAMERAS)]
    one_each(folder, names)
    with contextlib.ExitStack() as stack:
        cameras = [stack.enter_context(RtspCamera(size=SIZE)) for _ in names]
        cameras[0].silent = fault == "silent"
        sources = {
            name: {"source": one.url, "fps": ASKED_FPS, "timeout_s": 2}
            for name, one in zip(names, cameras, strict=True)
        }
        box = stack.enter_context(Running(folder, cameras=sources, factories=FACTORIES, http=HTTP))
        awaited = set(names[1:] if fault == "silent" else names)
        while awaited:
            box.until(lambda: [awaited.discard(one["query"]) for one in box.news()])
        started_s, started_cpu_s = time.monotonic() - box.began, box.cpu_s()
        tell(f"serving after {started_s:.1f} s")
        setattr(cameras[0], fault, True)
        since = time.time()
        time.sleep(seconds)
        until = time.time()
        came = Counter[str]()
        box.until(lambda: came.update(_within(box, since, until)) or box.news() == [])
        state = next(one for one in box.status()["cameras"] if one["id"] == names[0])["state"]
        ended, summary = box.stop(), box.ledger()
    expected = ASKED_FPS * (until - since)
    lost = {name: max(0.0, 1 - came[name] / expected) for name in names[1:]}
    mean, worst = sum(lost.values()) / len(lost), max(lost.values())
    found = Found(
        f"{seconds} s: the others lost {100 * mean:.2f} % of their frames, the worst of them {100 * worst:.2f} %; "
        f"all others served {started_s:.1f} s after the start, which took {started_cpu_s:.1f} s of CPU time",
        {
            "start_cpu_s": round(started_cpu_s, 2),
            "lost_mean": round(mean, 4),
            "lost_worst": round(worst, 4),
            "start_s": round(started_s, 2),
            "state": state,
        },
    )
    found.in_time(mean < MAX_LOST, f"the others lost {mean:.2%} of their frames")
    found.in_time(started_s < MAX_START_S, f"it served only after {started_s:.1f} s")
    found.hold(state == "away", f"the camera is {state}")
    found.hold(ended == 0 and adds_up(summary), "the ledger does not add up")
    return found


def _within(box: Running, since: float, until: float) -> list[str]:
    return [one["query"] for one in box.news() if since <= one["captured_at"] < until]


def damage_video(folder: Path, times: int, tell: Tell) -> Found:
    """A stream with flipped bits, cut within a frame, of another size; and files with flipped bits or cut off."""
    one_each(folder, ["c"])
    took: dict[str, list[float]] = {"flipped": [], "cut": [], "size": []}
    with RtspCamera(size=SIZE) as camera, Running(
        folder, cameras={"c": {"source": camera.url, "timeout_s": 2}}, factories=FACTORIES
    ) as box:  # fmt: skip
        for index in range(times):
            box.until(box.news)
            kind = tuple(took)[index % len(took)]
            if kind == "flipped":
                camera.flipping = True
                time.sleep(DAMAGE_S)
                camera.flipping = False
            elif kind == "cut":
                camera.tear()
            else:
                camera.size = OTHER_SIZE if camera.size == SIZE else SIZE
            since = time.time()
            box.until(lambda since=since: any(one["captured_at"] > since + 0.1 for one in box.news()))
            took[kind].append(time.time() - since)
            tell(f"{index + 1} of {times} faults of a stream")
        ended, streamed = box.stop(), box.ledger()
    seen = streamed["cameras"][0]
    ended_files, files = _damaged_files(folder, times, tell)
    worst = {kind: max(seconds, default=0.0) for kind, seconds in took.items()}
    decoded = sum(camera["frames"] for box in files for camera in box["cameras"])
    lost = sum(camera["undecodable"] for box in files for camera in box["cameras"])
    found = Found(
        f"{times} faults of a stream: the next result after {worst['flipped']:.2f} s at most (bits), "
        f"{worst['cut']:.2f} s (cut), {worst['size']:.2f} s (size), {seen['undecodable']} frames counted as damaged; "
        f"{times} damaged files: {decoded} frames decoded, {lost} counted as damaged, no crash",
        {"worst_s": {kind: round(value, 3) for kind, value in worst.items()}, "undecodable": seen["undecodable"],
         "reconnects": seen["reconnects"], "file_frames": decoded, "file_undecodable": lost},
    )  # fmt: skip
    found.hold(ended == 0 and adds_up(streamed), "the ledger does not add up")
    found.in_time(max(worst.values()) <= MAX_BACK_S, f"it went on only after {worst}")
    found.hold(seen["undecodable"] or not took["flipped"], "no frame was counted as damaged")
    found.hold(seen["reconnects"] >= len(took["cut"]), "a cut was not counted")
    found.hold(all(code in (0, 1) for code in ended_files), f"a box ended with {ended_files}")
    found.hold(all(map(adds_up, files)), "a ledger of files does not add up")
    found.hold(decoded and total(files[0], "processed"), "no frame of a damaged file was processed")
    return found


def _damaged_files(folder: Path, times: int, tell: Tell) -> tuple[list[int], list[dict[str, Any]]]:
    """Boxes that play damaged clips to their end: exit codes and ledgers."""
    chance, codes, ledgers = random.Random(0), [], []
    whole = write_clip(folder / "whole.mp4", 50, 25, size=SIZE).read_bytes()
    for first in range(0, times, CLIPS_AT_ONCE):
        names = [f"c{index}" for index in range(first, min(times, first + CLIPS_AT_ONCE))]
        for index, name in enumerate(names, first):
            (folder / f"{name}.mp4").write_bytes(_worn(whole, chance, cut=index % 4 == 3))
        one_each(folder, names)
        cameras = {name: {"source": f"{name}.mp4"} for name in names}
        with Running(folder, cameras=cameras, factories=FACTORIES) as box:
            codes.append(box.wait_exit(120))
            ledgers.append(box.ledger())
        tell(f"{first + len(names)} of {times} damaged files")
    return codes, ledgers


def _worn(data: bytes, chance: random.Random, cut: bool) -> bytes:
    if cut:
        return data[: chance.randrange(len(data) // 4, len(data))]
    worn = bytearray(data)
    for _ in range(20):
        worn[chance.randrange(len(worn))] ^= 1 << chance.randrange(8)
    return bytes(worn)
