"""`gemel run` in a process of its own, observed through its files, stderr, HTTP and resource usage."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.edge_runtime.tiny import write_config

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0
END_S = 5.0
ADDRESS = re.compile(r"dashboard at (http://\S+)/\n")
TICKS = os.sysconf("SC_CLK_TCK")


class Running:
    """A box in a process of its own, killed on exit; its stderr goes to err.txt.

    Beside its config it takes a `line` of its own instead of `-m gemel run box.yaml`, where its standard output goes,
    and more variables of the environment.
    """

    def __init__(
        self, folder: Path, *line: str, out: Any = subprocess.DEVNULL, env: dict[str, str] | None = None, **keys: Any
    ) -> None:
        write_config(folder, **{"spool": "spool", **keys})
        (folder / "spool").mkdir(exist_ok=True)
        self.folder, self._tails = folder, dict[str, Tail]()
        command = [sys.executable, *(line or ("-m", "gemel", "run", "box.yaml"))]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(env or {})}
        self.began = time.monotonic()
        with open(folder / "err.txt", "wb") as err:
            self.process = subprocess.Popen(command, cwd=folder, env=variables, stdout=out, stderr=err)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL the process and its children."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for child in children.read_text().split() if children.exists() else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def until(self, true: Callable[[], Any], most_s: float = START_S) -> None:
        """Wait for a condition; AssertionError with stderr where the box ends or the time is over."""
        ends = time.monotonic() + most_s
        while not true():
            assert self.process.poll() is None, self.read_stderr()
            assert time.monotonic() < ends, self.read_stderr()
            time.sleep(0.02)

    def wait_exit(self, most_s: float) -> int:
        """Exit code, once the process ends by itself."""
        try:
            return self.process.wait(most_s)
        finally:
            self.process.kill()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Exit code after a signal."""
        self.process.send_signal(number)
        return self.wait_exit(START_S)

    def read_stderr(self) -> str:
        """stderr so far."""
        return (self.folder / "err.txt").read_text()

    def results(self, name: str = "results.jsonl") -> list[dict[str, Any]]:
        """Every record of a file of results; while the box writes, of its whole lines."""
        path, writing = self.folder / name, self.process.poll() is None
        text = path.read_text() if path.exists() else ""
        if writing:
            text = text[: text.rfind("\n") + 1]
        return [json.loads(line) for line in text.splitlines()]

    def news(self, name: str = "results.jsonl") -> list[dict[str, Any]]:
        """Records appended to a results file since the last call."""
        return self._tails.setdefault(name, Tail(self.folder / name)).news()

    def ledger(self) -> dict[str, Any]:
        """The ledger file."""
        return json.loads((self.folder / "spool" / "ledger.json").read_text())

    def get(self, path: str, most_s: float = 5.0) -> bytes:
        """Body of an HTTP answer, whatever its status; asked with the folder's token, if it has one."""
        token = self.folder / "token"
        headers = {"Authorization": f"Bearer {token.read_text().strip()}"} if token.exists() else {}
        request = urllib.request.Request(self.address() + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=most_s) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            return error.read()

    def address(self) -> str:
        """Base URL of the dashboard."""
        self.until(lambda: ADDRESS.search(self.read_stderr()))
        found = ADDRESS.search(self.read_stderr())
        assert found is not None
        return found[1]

    def status(self) -> dict[str, Any]:
        """`/api/status`."""
        return json.loads(self.get("/api/status"))

    def measure_usage(self) -> dict[str, int]:
        """Usage of the process: anonymous `memory_bytes`, `threads` and open `descriptors`."""
        proc = Path(f"/proc/{self.process.pid}")
        fields = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        return {
            "memory_bytes": 1024 * int(fields["RssAnon"].split()[0]),
            "threads": len(os.listdir(proc / "task")),
            "descriptors": len(os.listdir(proc / "fd")),
        }

    def cpu_s(self) -> float:
        """CPU seconds so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS


class Tail:
    """The lines that are appended to a file, each once."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def news(self) -> list[dict[str, Any]]:
        """The whole lines that are new, as JSON."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def adds_up(summary: dict[str, Any]) -> bool:
    """Whether every query's frames are all accounted for."""
    return summary["balanced"] and all(
        row["received"] == row["processed"] + row["failed"] + row["pending"] + sum(row["dropped"].values())
        for row in summary["ledger"]
    )


def total(summary: dict[str, Any], *names: str) -> int:
    """Frames of all queries with these outcomes."""
    rows: Iterable[dict[str, Any]] = summary["ledger"]
    return sum(row[name] if name != "dropped" else sum(row[name].values()) for row in rows for name in names)
