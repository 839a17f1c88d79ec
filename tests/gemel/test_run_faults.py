"""`gemel run` as a service among things that fail: unread pipes, full disks, engines that hang, signals."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import platform
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.edge_runtime.capture.faulty_cameras import RtspCamera
from tests.edge_runtime.running import START_S, Running, adds_up
from tests.edge_runtime.tiny import write_box

LOOPING = {"left": {"source": "left.mp4", "loop": True}, "right": {"source": "right", "fps": 12, "loop": True}}
HANGING = """
import sys, threading, time
from gemel.edge_runtime.engines.torch_engine import TorchEngine
from gemel.edge_runtime.life import executor
from gemel.cli import main
executor.MIN_HANG_S = {least_s}
run, runs = TorchEngine.run, []
def hang(engine, frames, *rest):
    runs.append(engine)
    if len(runs) > 30:
        open("hanging", "w").close()
        threading.Event().wait()
    return run(engine, frames, *rest)
TorchEngine.run = hang
sys.argv[1:] = ["run", "box.yaml"]
sys.exit(main())
"""
LOADING = """
import signal, sys, time
from gemel.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
class Slow:
    def find_spec(self, name, path, target=None):
        if name == "gemel.edge_runtime.life.daemon":
            open("up", "w").close()
            while True:
                time.sleep(0.01)
sys.meta_path.insert(0, Slow())
sys.argv[1:] = ["run", "box.yaml", "--json"]
sys.exit(main())
"""


@pytest.fixture
def box(tmp_path: Path) -> Path:
    return write_box(tmp_path)


@pytest.fixture
def running(box: Path) -> Iterator[Callable[..., Running]]:
    made: list[Running] = []

    def begin(*line: str, **keys: Any) -> Running:
        made.append(Running(box, *line, **{"cameras": LOOPING, **keys}))
        return made[-1]

    yield begin
    for one in made:
        one.kill()


def test_box_blocked_pipe_and_full_disk_stop_no_other_sink(running, box):
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    sinks = [{"kind": "jsonl"}, {"kind": "jsonl", "path": "/dev/full"}, {"kind": "jsonl", "path": "results.jsonl"}]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(box / "notify"))
        manager.settimeout(START_S)
        variables = {"NOTIFY_SOCKET": str(box / "notify"), "WATCHDOG_USEC": "600000"}
        one = running(out=writing, env=variables, sinks=sinks)
        received = [manager.recv(100)]
        while received.count(b"WATCHDOG=1") < 3 or b"READY=1" not in received:
            received.append(manager.recv(100))
    os.close(writing)
    one.until(lambda: len(one.results()) > 80)
    assert select.select([reading], [], [], 0)[0]
    one.process.send_signal(signal.SIGHUP)
    before = len(one.results())
    (box / "results.jsonl").rename(box / "moved.jsonl")
    one.until(lambda: len(one.results()) > 10)
    assert len(one.results("moved.jsonl")) >= before and "reopening files" in one.read_stderr()
    assert one.stop() == 0
    os.close(reading)
    summary = one.ledger()
    assert adds_up(summary) and summary["stopped_by"] == "SIGTERM" and summary["fault"] is None
    piped, full, kept = summary["sinks"]
    processed = sum(row["processed"] for row in summary["ledger"])
    for sink in (piped, full, kept):
        assert sink["delivered"] + sum(sink["undelivered"].values()) == processed and sink["queued"] == 0
    assert kept["delivered"] == processed == len(one.results()) + len(one.results("moved.jsonl"))
    assert full["undelivered"] == {"disk_full": processed} and piped["undelivered"] and piped["delivered"] > 0
    assert not any(row["failed"] for row in summary["ledger"]), "a sink's failure is no query's"


def test_box_restarted_after_kill_writes_no_key_twice(running, box):
    one = running()
    one.until(lambda: len(one.results()) >= 20)
    if platform.libc_ver()[0] == "glibc":
        assert count_extra_arenas(one.process.pid) == 0, "a box uses one heap"
    one.process.kill()
    one.process.wait()
    before = (box / "results.jsonl").read_text().count("\n")
    with open(box / "results.jsonl", "a") as file:
        file.write('{"run":"r","query":"ga')
    one = running()
    one.until(lambda: (box / "results.jsonl").read_text().count("\n") > before)
    assert one.stop() == 0
    keys = [(record["run"], record["query"], record["frame"]) for record in one.results()]
    assert len(set(keys)) == len(keys) and len({key[0] for key in keys}) == 2
    assert len({key[1:] for key in keys}) < len(keys), "frames are counted anew"


@pytest.mark.parametrize("least_s", [3.0, 1000.0], ids=["watched", "stopped"])
def test_box_hanging_engine_ends_with_the_ledger_written(running, least_s):
    one = running("-c", HANGING.format(least_s=least_s))
    one.until((one.folder / "hanging").exists)
    if least_s == 3.0:
        assert one.wait_exit(60.0) == 1
        last = one.read_stderr().splitlines()[-1]
        assert last.startswith("gemel: query ") and "has not ended for 3." in last
    else:
        assert one.stop() == 0
    summary = one.ledger()
    assert adds_up(summary) and summary["hanging"] == ["the inference"]
    assert sum(row["processed"] for row in summary["ledger"]) == len(one.results())


def test_box_signal_at_start_gives_exit_code_0(running):
    one = running("-c", "import gemel.edge_runtime.life.daemon, sys\nfrom gemel.cli import main\n"
                  "open('up', 'w').close()\n"
                  "sys.argv[1:] = ['run', 'box.yaml']\nsys.exit(main())")  # fmt: skip
    one.until((one.folder / "up").exists)
    time.sleep(0.3)
    assert one.stop() == 0
    assert "Traceback" not in one.read_stderr()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_box_signal_during_imports_gives_exit_code_0(running, number):
    reading, writing = os.pipe()
    one = running("-c", LOADING, out=writing)
    os.close(writing)
    one.until((one.folder / "up").exists)
    one.process.send_signal(signal.SIGHUP)
    assert one.stop(number) == 0, one.read_stderr()
    with open(reading) as out:
        assert json.loads(out.read())["stopped_by"] == number.name
    assert one.read_stderr() == f"{number.name} came before the box served\n"


def test_box_called_from_a_program_starts_once(running):
    reading, writing = os.pipe()
    program = "from gemel.cli import main\nprint('once', flush=True)\nsys.argv[1:] = ['run', 'absent.yaml']\nmain()"
    one = running("-c", f"import sys\n{program}", out=writing)
    os.close(writing)
    assert one.wait_exit(START_S) == 0
    with open(reading) as out:
        assert out.read() == "once\n"


def test_box_signal_ends_silent_cameras(running):
    with RtspCamera() as silent, RtspCamera() as muted:
        silent.silent = True
        cameras = {"left": {"source": silent.url, "timeout_s": 60}, "right": {"source": muted.url, "timeout_s": 60}}
        one = running(cameras=cameras)
        one.until(one.results)
        muted.muted = True
        seen = len(one.results())
        time.sleep(0.5)  # now its decoder waits in vain
        assert one.stop() == 0, one.read_stderr()
    assert adds_up(one.ledger()) and "Traceback" not in one.read_stderr() and len(one.results()) >= seen


ARENA_BYTES = 2**26
"""glibc reserves each arena but the first as one aligned mapping of this size."""


def count_extra_arenas(pid: int) -> int:
    """Mappings of a process that are malloc arenas of threads: a used part, and a reserved part that completes it."""
    rows = [line.split()[:2] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    ranges = [(*(int(one, 16) for one in addresses.split("-")), rights) for addresses, rights in rows]
    return sum(
        start % ARENA_BYTES == 0 and after_rights == "---p" and after_end == start + ARENA_BYTES
        for (start, _, _), (_, after_end, after_rights) in itertools.pairwise(ranges)
    )
