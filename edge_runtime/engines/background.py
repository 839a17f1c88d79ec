"""Measures and prepares engines in a process of its own, which gives way to everything else, while a box serves.

A process, not a thread: compilers are Python for the most part, and would hold the interpreter that serves.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from edge_runtime.engines import telling
from edge_runtime.engines.preparing import Wish, engines_for
from edge_runtime.engines.registry import AUTO, ENGINES
from models.bundle import Bundle, open_bundle

BEGINNING = """
import sys
sys.path.pop(0)
import os, runpy
os.setpgid(0, 0)
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""Leaves the folder it is begun in, where anything may lie, out of the search for modules; and enters a group of its
own, so that all its compilers can be ended. Not a session, whose threads the system may schedule as if their priority
were that of any other session's.
"""
MIN_PRIORITY = 19
TIMEOUT_S = 1.0

log = logging.getLogger("gemel.run")


@dataclass(frozen=True)
class Errand:
    """What the process is asked: the engines of these kinds for a bundle's queries, as JSON values."""

    bundle: str
    factories: list[str]
    folder: str | None
    device: str
    stays: bool
    overflow: list[str]
    threads: int
    engines: dict[str, list[str]]

    @classmethod
    def of(cls, bundle: Bundle, wish: Wish) -> Errand:
        kinds = {name: list(kind) for name, kind in ENGINES.items()}
        folder = None if bundle.folder is None else str(bundle.folder.resolve())
        return cls(
            str(bundle.path.resolve()),
            sorted(bundle.factories),
            folder,
            wish.device,
            wish.stays,
            list(wish.overflow),
            torch.get_num_threads(),
            kinds,
        )


class Background:
    """The process that measures and prepares for `auto`; what it finds is in the engines' cache once it has ended.

    What it says goes to the log. It ends with the process that began it, however that ends.
    """

    def __init__(self, bundle: Bundle, wish: Wish) -> None:
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed in `wait`)
        command = [sys.executable, "-c", BEGINNING, __name__, json.dumps(asdict(Errand.of(bundle, wish)))]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )

    def wait(self) -> str | None:
        """Return when it has ended, and log what it says until then: None when all went well, else why not."""
        with self._process as process, self._errors as errors:
            assert process.stdout is not None
            for line in process.stdout:
                log.info("%s", line.rstrip("\n"))
            code = process.wait()
            errors.seek(0)
            said = errors.read().strip().splitlines()
        return None if code == 0 else said[-1] if said else f"its process ended with {code}"

    def stop(self) -> None:
        """End the process and all that it started; what does not end by itself is killed."""
        for number in (signal.SIGTERM, signal.SIGKILL):  # the second also for what outlives the process itself
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(TIMEOUT_S)


def main(errand: Errand) -> None:
    """Measure and prepare; what is said goes to stdout."""
    os.nice(MIN_PRIORITY)
    with contextlib.suppress(OSError):  # should memory run out, this process goes and not the box
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log.addHandler(logging.StreamHandler(sys.stdout))
    log.setLevel(logging.INFO)
    log.propagate = False  # what libraries have to say is not for the box's log
    telling.log.disabled = True  # nobody waits for this
    torch.set_num_threads(errand.threads)
    ENGINES.clear()
    ENGINES.update({name: (module, kind) for name, (module, kind) in errand.engines.items()})
    folder = None if errand.folder is None else Path(errand.folder)
    bundle = open_bundle(errand.bundle, errand.factories, folder)
    nothing: dict[str, Any] = dict.fromkeys(errand.overflow, ())
    engines_for(bundle, AUTO, Wish(errand.device, stays=errand.stays, overflow=nothing))


def _end_with_parent() -> None:
    """End, with all compilers, when the process that began this one is gone and so closes the pipe."""
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(Errand(**json.loads(sys.argv[1])))
