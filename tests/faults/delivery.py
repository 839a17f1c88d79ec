"""Sinks in trouble: a full disk, a broker that is gone, a server that hangs, a pipe without a reader."""

from __future__ import annotations

import contextlib
import fcntl
import http.server
import json
import os
import socketserver
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.edge_runtime.running import END_S, Running, adds_up, total
from tests.edge_runtime.sinks.broker import MOSQUITTO, Broker
from tests.edge_runtime.tiny import write_clip
from tests.faults.cameras import HTTP
from tests.faults.queries import FACTORIES, one_each
from tests.faults.scenario import Found, Missing, Tell

DISK_BYTES, PIPE_BYTES = 2**23, 4096
FPS, QUERIES = 10.0, 4
HANGS_S, SHORT_S = 60.0, 8.0
"""How long the server hangs in the first round of several, and in all others."""
MAX_RECOVERY_S = 30.0
MIN_GOING_ON = 0.9


class Hook:
    """A server that takes results, and answers to none while it `hangs`."""

    def __init__(self) -> None:
        hook = self
        self.answers = threading.Event()
        self.taken = 0

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                hook.answers.wait()
                hook.taken += 1
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None: ...

        self.answers.set()
        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Serve no more."""
        self.answers.set()
        self._server.shutdown()


class Pipe:
    """The standard output of a box, with a reader that can pause."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        fcntl.fcntl(self.writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.read = threading.Event()
        self.read.set()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while self.read.wait() and os.read(self._reading, PIPE_BYTES):
            pass


class Disk:
    """A small file system of its own, which can be filled."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._filler = folder, folder / "filler"

    def fill(self) -> None:
        """Leave no room."""
        with open(self._filler, "ab", buffering=0) as file:
            for size in (1 << 20, 512):  # in large steps, then to the last byte
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def empty(self) -> None:
        """Give the room back."""
        self._filler.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(folder: Path, nbytes: int = DISK_BYTES) -> Iterator[Disk]:
    """A real file system of so many bytes; Missing where nothing can be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        raise Missing(f"nothing can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def troubles(folder: Path, times: int, tell: Tell) -> Found:
    """All four at once, again and again, and at the end."""
    if MOSQUITTO is None:
        raise Missing("the broker mosquitto is not installed")
    names = [f"q{index}" for index in range(QUERIES)]
    one_each(folder, names, sla_ms=2000.0)
    write_clip(folder / "c.mp4", 30, FPS)
    keys: dict[str, Any] = {
        "cameras": {name: {"source": "c.mp4", "loop": True} for name in names}, "factories": FACTORIES, "http": HTTP,
        "trace": "disk/trace.jsonl",
        "spool": "disk",
    }  # fmt: skip
    found, pipe, hook = Found(), Pipe(), Hook()
    went_on, back_s, ended_s = [], [], []
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(small_disk(folder / "disk"))
        broker = Broker(folder)
        stack.callback(broker.end)
        stack.callback(hook.close)
        keys["sinks"] = [
            {"kind": "jsonl", "path": "disk/results.jsonl"},
            {"kind": "mqtt", "host": "127.0.0.1", "port": broker.port},
            {"kind": "webhook", "url": hook.url},
            {"kind": "jsonl"},
        ]  # fmt: skip

        def trouble() -> None:
            disk.fill()
            broker.end()
            hook.answers.clear()
            pipe.read.clear()

        def relief() -> None:
            disk.empty()
            broker.start()
            hook.answers.set()
            pipe.read.set()

        def is_well(box: Running, since: list[int]) -> bool:
            sinks = box.status()["sinks"]
            moved = all(one["delivered"] > before for one, before in zip(sinks, since, strict=True))
            return moved and all(one["state"] == "up" for one in sinks)

        box = stack.enter_context(Running(folder, out=pipe.writing, **keys))
        box.until(lambda: is_well(box, [0] * 4))
        for index in range(times):
            lasts_s = HANGS_S if times > 1 and index == 0 else SHORT_S
            trouble()
            before, since = box.status(), time.monotonic()
            time.sleep(lasts_s)
            after, took = box.status(), time.monotonic() - since
            asked = QUERIES * FPS * took
            went_on.append((_count_processed(after) - _count_processed(before)) / asked)
            down = [one["state"] for one in after["sinks"]]
            relief()
            since = time.monotonic()
            box.until(lambda after=after: is_well(box, [one["delivered"] for one in after["sinks"]]), 120)
            back_s.append(time.monotonic() - since)
            found.hold(down == ["down"] * 4, f"in trouble the sinks are {down}")
            tell(f"{index + 1} of {times}: {100 * went_on[-1]:.0f} % of frames meanwhile, back in {back_s[-1]:.1f} s")
        ended_s.append(_ends(box, found))
        _check(box.folder / "disk", found)
        # Once more, ended while the disk has no room, and then while all else is in trouble.
        for full in (True, False):
            box = stack.enter_context(Running(folder, out=pipe.writing, **keys))
            box.until(lambda box=box: is_well(box, [0] * 4))
            trouble()
            if not full:
                disk.empty()
            box.until(lambda box=box: [one["state"] for one in box.status()["sinks"]][1:] == ["down"] * 3)
            ended_s.append(_ends(box, found))
            if not full:
                _check(box.folder / "disk", found)
            relief()
    found.said = (
        f"{times} times all four at once, {HANGS_S if times > 1 else SHORT_S:.0f} s the longest: "
        f"{100 * min(went_on):.0f} % or more of the frames answered meanwhile, every sink took results again within "
        f"{max(back_s):.1f} s; SIGTERM in trouble: ended in {max(ended_s):.1f} s at most, exit code 0, ledger written"
    )
    found.figures = {
        "went_on_least": round(min(went_on), 3), "back_s_max": round(max(back_s), 2),
        "end_s_max": round(max(ended_s), 2),
    }  # fmt: skip
    found.in_time(min(went_on) >= MIN_GOING_ON, f"only {min(went_on):.0%} of the frames were answered meanwhile")
    found.in_time(max(back_s) <= MAX_RECOVERY_S, f"sinks took results only after {max(back_s):.0f} s")
    return found


def _ends(box: Running, found: Found) -> float:
    """How long it takes to end."""
    since = time.monotonic()
    box.process.terminate()
    try:
        code = box.process.wait(2 * END_S)
    except subprocess.TimeoutExpired:
        code = None
    took = time.monotonic() - since
    found.hold(code == 0, f"it ended with {code}: {box.read_stderr()[-500:]}")
    found.in_time(took <= END_S, f"it ended only after {took:.1f} s")
    return took


def _check(spool: Path, found: Found) -> None:
    """The final ledger of a box whose disk had room."""
    summary = json.loads((spool / "ledger.json").read_text())
    found.hold(summary["stopped_by"] == "SIGTERM", "the final ledger was not written")
    processed = total(summary, "processed")
    found.hold(adds_up(summary) and not total(summary, "failed"), "the ledger does not add up")
    for sink in summary["sinks"]:
        told = sink["delivered"] + sum(sink["undelivered"].values()) + sink["queued"]
        found.hold(told == processed, f"{sink['kind']}: {told} of {processed} results are accounted for")


def _count_processed(status: dict[str, Any]) -> int:
    return sum(one["ledger"]["processed"] for one in status["queries"])
