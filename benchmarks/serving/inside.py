"""A box at work in this process, and which of its threads took how much processor time.

Usage: python -m benchmarks.serving.inside CONFIG SECONDS [--watched]

Prints JSON. Each thread has a clock of its own; what is done in a camera's thread for the box (mailboxes, scene change,
pictures kept for the dashboard) counts as the box's own work, what an engine does (crops, resizes, the network,
answers) as inference, in any thread. With `--watched` a dashboard is open meanwhile, in another process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from benchmarks.machine import machine
from gemel.edge_runtime.engines.torch_engine import TorchEngine
from gemel.edge_runtime.frames.queues import Mailboxes, SceneChange
from gemel.edge_runtime.http.app import HttpService
from gemel.edge_runtime.http.snapshots import Observer
from gemel.edge_runtime.life import daemon

WARM_S = 5.0
TIMEOUT_S = 120.0
POLL_INTERVAL_S = 0.05
CAPTURE, HTTP = ("camera-", "reader-"), ("http", "asyncio_")
DASHBOARD = """
import asyncio, sys, aiohttp
async def watch():
    async with aiohttp.ClientSession() as session, session.ws_connect(sys.argv[1]) as dashboard:
        async for _ in dashboard:
            pass
asyncio.run(watch())
"""


class Spent:
    """Seconds of processor time in some functions, all threads together."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def count(self, owner: type, name: str, under: str) -> None:
        """From now on, count what this method takes."""
        method: Callable[..., Any] = getattr(owner, name)

        @wraps(method)
        def count_call(*given: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*given, **named)
            finally:
                took = time.thread_time() - began
                with self._lock:
                    self.seconds[under] += took

        setattr(owner, name, count_call)


def threads() -> dict[str, float]:
    """Seconds of processor time of the threads that are alive, by kind, and of the whole process (`all`)."""
    spent = {"all": time.process_time(), "capture": 0.0, "http": 0.0, "rest": 0.0}
    for thread in threading.enumerate():
        if thread.ident is not None:
            seconds = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            kind = "capture" if thread.name.startswith(CAPTURE) else "http" if thread.name.startswith(HTTP) else "rest"
            spent[kind] += seconds
    return spent


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("seconds", type=float)
    parser.add_argument("--watched", action="store_true")
    given = parser.parse_args()
    spent, services, stopping = Spent(), [], threading.Event()
    spent.count(TorchEngine, "run", "inference")
    for owner, name in ((Mailboxes, "put"), (SceneChange, "add"), (Observer, "add_frame")):
        spent.count(owner, name, "beside capture")
    start = HttpService.start
    HttpService.start = lambda one: (services.append(one), start(one))[1]  # type: ignore[method-assign]
    done: list[dict[str, Any]] = []
    working = threading.Thread(target=lambda: done.append(daemon.run(given.config, stop=stopping)), name="box")
    working.start()
    ends = time.monotonic() + TIMEOUT_S
    while not any(thread.name.startswith("reader-") for thread in threading.enumerate()):
        if time.monotonic() > ends or not working.is_alive():
            sys.exit("the box does not serve")
        time.sleep(POLL_INTERVAL_S)
    with dashboard(services[0].port if given.watched else None):
        time.sleep(WARM_S)
        before, inner, began = threads(), dict(spent.seconds), time.monotonic()
        time.sleep(given.seconds)
        took = time.monotonic() - began
        used = {kind: seconds - before[kind] for kind, seconds in threads().items()}
        within = {under: seconds - inner.get(under, 0.0) for under, seconds in spent.seconds.items()}
    stopping.set()
    working.join()
    frames = sum(row["processed"] for row in done[0]["ledger"])
    received = sum(row["received"] for row in done[0]["ledger"])
    seconds = done[0]["seconds"]
    per_s = frames / seconds
    capture = used["capture"] - within["beside capture"]
    own = used["all"] - capture - within["inference"] - used["http"]
    print(json.dumps({
        "seconds": round(took, 1), "frames_per_s": round(per_s, 2), "received": received, "processed": frames,
        "served_s": seconds, "own_ms_per_frame": round(1000 * own / (per_s * took), 3),
        "capture_ms_per_frame": round(1000 * capture / (per_s * took), 3),
        "inference_ms_per_frame": round(1000 * within["inference"] / (per_s * took), 3),
        "http_core_share": round(used["http"] / took, 4), "core_share": round(used["all"] / took, 3),
        "balanced": done[0]["balanced"], "machine": machine(),
    }))  # fmt: skip


@contextmanager
def dashboard(port: int | None) -> Iterator[None]:
    """Somebody looks at the dashboard meanwhile, unless there is no port."""
    if port is None:
        yield
        return
    watching = subprocess.Popen([sys.executable, "-c", DASHBOARD, f"ws://127.0.0.1:{port}/api/watch"])
    try:
        yield
        assert watching.poll() is None, "the dashboard went away"
    finally:
        watching.kill()
        watching.wait()


if __name__ == "__main__":
    main()
