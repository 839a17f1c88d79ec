"""Workers on this machine: processes of their own, which get their jobs by files in the merge's folder.

They are started as `python -c`, not forked (threads and GPUs don't survive that) and not by `multiprocessing`, which
would import the caller's main module again. A worker ends with its connection: when the main process is gone, killed
or not, it ends at its next training step.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from merger.journal.checkpoint import Checkpoint
from merger.workers.desk import Desk, Setup, Task, read, write
from merger.workers.jobs import Done, Job, Order
from merger.workers.pool import Failed, Lost, News, Told
from models.errors import InputError

PROGRAM = "import sys; from merger.workers.local import serve; serve(int(sys.argv[1]), sys.argv[2])"
PATIENCE_S = 10.0
"""How long a worker that was told to end may take."""


class Processes:
    """Processes on this machine (merger.workers.pool.Crew); `folder` holds what travels, and jobs half done.

    Workers are made of `setup()`, called when the first is needed.
    """

    def __init__(self, setup: Callable[[], Setup], folder: Path) -> None:
        self._make, self._folder = setup, folder
        self._setup = folder / "setup.pickle"
        self._hired = 0

    def hire(self) -> Process | None:
        """One more process; None where there is no room for one."""
        try:
            if not self._hired:
                self._folder.mkdir(parents=True, exist_ok=True)
                for left in self._folder.glob("*.pt"):  # of a merge that was killed
                    left.unlink()
                self._setup.write_bytes(pickle.dumps(self._make()))
            self._hired += 1
            return Process(self._hired, self._setup, self._folder)
        except OSError:
            return None

    def wait(self, busy: Sequence[Process]) -> tuple[Process, News]:
        """The next news of one of these."""
        by_connection = {one.connection: one for one in busy}
        found = by_connection[wait(list(by_connection))[0]]  # type: ignore[index]
        return found, found.news()

    def close(self) -> None:
        """Nothing is left but what a resumed merge goes on with."""


class Process:
    """One worker process (merger.workers.pool.Hand)."""

    def __init__(self, number: int, setup: Path, folder: Path) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", PROGRAM, str(theirs.fileno()), str(setup)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        with theirs:
            # A session of its own, so that Ctrl-C reaches the main process alone, which then ends all workers.
            self._process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
            )  # fmt: skip
        self.name = f"worker {number} (process {self._process.pid})"
        self.connection = Connection(ours.detach())
        self._folder, self._stem = folder, folder / f"worker-{number}"

    def begin(self, job: Job, order: Order) -> None:
        """Write what the job is given and tell the worker; OSError when there is no room, or no worker any more."""
        path = self._stem.with_suffix(".in.pt")
        with path.open("wb") as file:
            write(dict(job.given), file)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        digest.update(repr((job.do.__qualname__, order)).encode())
        self.connection.send((Task.of(job, order), str(path), str(self._folder / digest.hexdigest()[:20])))

    def news(self) -> News:
        """What it has to say."""
        try:
            kind, *what = self.connection.recv()
        except (EOFError, OSError):
            return Lost(self._ended())
        if kind == "told":
            return Told(*what)
        if kind == "refused":
            return InputError(*what)
        if kind == "failed":
            return Failed(f"failed ({what[0]})")
        path = self._stem.with_suffix(".out.pt")
        value = read(path)
        path.unlink()
        return Done(value, what[0])

    def end(self) -> None:
        """Kill it: it holds nothing that is not on the disk."""
        self._process.kill()
        self._process.wait()
        self.connection.close()
        for path in self._folder.glob(f"{self._stem.name}.*"):
            path.unlink(missing_ok=True)

    def _ended(self) -> str:
        try:
            code = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            return "says nothing any more"
        if code == -signal.SIGKILL:
            return "was killed (out of memory?)"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _has_descriptor(stream: Any) -> bool:
    try:
        stream.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return True


class _Kept(Checkpoint):
    """What is done of a job, on the disk now and then; the worker ends when nobody waits for it any more."""

    def __init__(self, folder: Path, connection: Connection) -> None:
        self._connection = connection
        try:
            super().__init__(folder, {}, resume=True)
        except InputError:  # cut off, or of another version
            shutil.rmtree(folder, ignore_errors=True)
            super().__init__(folder, {}, resume=True)

    def tick(self) -> None:
        """Store everything if enough time has passed since it was stored last."""
        if self._connection.poll():
            raise EOFError
        super().tick()


def serve(descriptor: int, setup: str) -> None:
    """A worker process: one job after the other, until the connection ends."""
    with Connection(descriptor) as connection:
        try:
            _serve(connection, pickle.loads(Path(setup).read_bytes()))
        except (EOFError, OSError):
            return


def _serve(connection: Connection, setup: Setup) -> None:
    def tell(event: str, **fields: Any) -> None:
        connection.send(("told", event, fields))

    desk = Desk(setup, tell)
    while True:
        task, path, folder = connection.recv()
        kept = _Kept(Path(folder), connection)
        try:
            done = desk.do(task, read(path), kept)
            with Path(path.replace(".in.pt", ".out.pt")).open("wb") as file:
                write(done.value, file)
        except InputError as error:
            connection.send(("refused", error.where, error.fault, error.remedy, error.key))
        except EOFError:
            raise
        except Exception as error:  # whatever it is, the main process meets it again when it does the job itself
            connection.send(("failed", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"))
        else:
            connection.send(("done", done.work))
        kept.remove()
