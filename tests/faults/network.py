"""Idle clients, overload in words, updates that are killed: each on the real thing."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import time
from pathlib import Path

from tests.edge_runtime.running import Running, adds_up
from tests.edge_runtime.tiny import write_clip
from tests.edge_runtime.update_fixture import Fixture, kill_rollbacks, kill_updates
from tests.faults.cameras import HTTP
from tests.faults.queries import FACTORIES, one_each
from tests.faults.scenario import Found, Missing, Tell

MAX_HEALTH_S, MAX_MORE_BYTES = 1.0, 30 * 2**20


def idle_clients(folder: Path, times: int, tell: Tell) -> Found:
    """So many connections of which half are silent and half send a head that never ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < times + 1000:
        raise Missing(f"a process may open {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, times + 1000), hard))
    one_each(folder, ["left"])
    write_clip(folder / "c.mp4", 30, 10)
    found, slowest = Found(), 0.0
    with contextlib.ExitStack() as stack:
        box = stack.enter_context(
            Running(folder, cameras={"left": {"source": "c.mp4", "loop": True}}, factories=FACTORIES, http=HTTP)
        )
        box.until(box.news)
        host, _, port = box.address().removeprefix("http://").rpartition(":")
        before = box.measure_usage()
        for index in range(times):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex((host, int(port)))
            if index % 2:
                with contextlib.suppress(OSError):
                    client.send(b"GET / HTTP/1.1\r\nX: ")
            if index % 250 == 249:
                began = time.monotonic()
                found.hold(box.get("/healthz", 10) == b"moving\n", f"health with {index + 1} connections")
                slowest = max(slowest, time.monotonic() - began)
        after = box.measure_usage()
        ended, summary = box.stop(), box.ledger()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    more = after["memory_bytes"] - before["memory_bytes"]
    tell(f"health within {1000 * slowest:.0f} ms")
    found.said = (
        f"{times:,} idle or slow connections: `/healthz` answered within {1000 * slowest:.0f} ms, "
        f"{max(0, more) / 2**20:.1f} MiB more memory, {after['descriptors'] - before['descriptors']} descriptors more"
    )
    found.figures = {"health_s_max": round(slowest, 3), "more_bytes": more}
    found.hold(more <= MAX_MORE_BYTES, f"{more / 2**20:.0f} MiB more memory")
    found.hold(ended == 0 and adds_up(summary), "the box did not go on")
    found.in_time(slowest <= MAX_HEALTH_S, f"health took {slowest:.1f} s")
    return found


def update_kills(folder: Path, times: int, tell: Tell) -> Found:
    """Killed at random moments while an update is downloaded, checked and installed."""
    new = kill_updates(Fixture(folder), times)
    tell(f"{new} of {times} times the new bundle")
    found = Found(f"{times} kills: the old bundle {times - new} times, the new one {new} times, never neither")
    found.figures = {"old": times - new, "new": new}
    return found


def rollback_kills(folder: Path, times: int, tell: Tell) -> Found:
    """Killed at random moments while a person rolls an update back."""
    old = kill_rollbacks(Fixture(folder), times)
    tell(f"{old} of {times} times the old bundle")
    found = Found(f"{times} kills: after the next start the old bundle {old} times, the new one {times - old} times")
    found.figures = {"old": old, "new": times - old}
    return found


def sink_refuses(folder: Path, times: int, tell: Tell) -> Found:
    """A webhook that answers 401 for some seconds, so many times."""
    from tests.edge_runtime.sinks.test_webhook import Server, serving

    one_each(folder, ["left"])
    write_clip(folder / "c.mp4", 30, 10)
    found = Found()
    with serving() as server:
        assert isinstance(server, Server)
        sinks = [{"kind": "webhook", "url": server.url}, {"kind": "jsonl", "path": "results.jsonl"}]
        cameras = {"left": {"source": "c.mp4", "loop": True}}
        with Running(folder, cameras=cameras, factories=FACTORIES, http=HTTP, sinks=sinks) as box:
            box.until(lambda: server.got)
            for index in range(times):
                server.statuses = [401] * 100_000
                box.until(lambda: box.status()["sinks"][0]["state"] == "down")
                time.sleep(5.0)
                server.statuses = []
                box.until(lambda: box.status()["sinks"][0]["state"] == "up", 60)
                tell(f"{index + 1} of {times}")
            box.until(lambda: box.status()["sinks"][0]["queued"] < 5, 60)
            row = json.loads(box.get("/api/status"))["sinks"][0]
            ended = box.stop()
    found.said = (
        f"{times} times 5 s of 401: {row['delivered']:,} results delivered, {row['undelivered'] or 'none'} lost"
    )
    found.figures = {"delivered": row["delivered"], "undelivered": row["undelivered"]}
    found.hold(row["undelivered"] == {} and ended == 0, f"results were lost: {row}")
    return found
