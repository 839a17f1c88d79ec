"""HTTP requests that its own schema allows, and others (schemathesis)."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tests.edge_runtime.running import Running, adds_up
from tests.edge_runtime.tiny import write_clip
from tests.faults.queries import FACTORIES, one_each
from tests.faults.scenario import Found, Tell

TOKEN = "0123456789abcdef0123456789abcdef"
MAX_ANSWER_S = 1.0
SLACK_S = 60.0


def fuzz(folder: Path, seconds: int, tell: Tell) -> Found:
    """Requests made from `/openapi.json`, with the token, for so many seconds."""
    one_each(folder, ["left", "right"])
    write_clip(folder / "c.mp4", 30, 10)
    (folder / "token").write_text(TOKEN)
    cameras = {name: {"source": "c.mp4", "loop": True} for name in ("left", "right")}
    http = {"bind": "127.0.0.1:0", "token_file": "token"}
    events = folder / "events.ndjson"
    with Running(folder, cameras=cameras, factories=FACTORIES, http=http) as box:
        box.until(box.news)
        ask = [
            sys.executable, "-m", "schemathesis.cli", "run", f"{box.address()}/openapi.json",
            "--header", f"Authorization: Bearer {TOKEN}", "--checks", "not_a_server_error",
            "--phases", "examples,coverage,fuzzing", "--max-time", str(seconds), "--continue-on-failure",
            "--max-response-time", str(MAX_ANSWER_S), "--suppress-health-check", "all", "--warnings", "off",
            "--report-ndjson-path", str(events), "--no-color", "--seed", "1",
        ]  # fmt: skip
        asked = subprocess.run(ask, cwd=folder, capture_output=True, text=True, timeout=seconds + SLACK_S, check=False)
        tell(f"schemathesis ended with {asked.returncode}")
        answered = len(box.news())
        began = time.monotonic()
        box.get("/healthz")
        for path in ("cameras/left", "cameras/right", "queries/left", "queries/right"):
            _switch_on(box.address(), path)  # the fuzzer has the token, and may have switched off everything
        box.until(box.news, 10)
        told, ended, summary = box.read_stderr(), box.stop(), box.ledger()
    statuses, slowest = _answers(events)
    count = sum(statuses.values())
    found = Found(
        f"{seconds} s: {count:,} requests, {sum(n for code, n in statuses.items() if code >= 500)} answered with 5xx, "
        f"the slowest in {1000 * slowest:.0f} ms; the box answered {answered:,} frames meanwhile",
        {"requests": count, "statuses": {str(code): n for code, n in sorted(statuses.items())},
         "slowest_s": round(slowest, 3)},
    )  # fmt: skip
    found.hold(count > 0, f"nothing was asked: {asked.stdout[-1000:]}{asked.stderr[-1000:]}")
    found.hold(not any(code >= 500 for code in statuses), f"5xx: {asked.stdout[-3000:]}")
    found.hold(asked.returncode in (0, 1), f"schemathesis ended with {asked.returncode}: {asked.stderr[-1000:]}")
    found.hold("failed" not in told, f"the box tells of a failure: {told[-1000:]}")
    found.hold(ended == 0 and adds_up(summary) and answered, "the box did not go on")
    found.in_time(slowest <= MAX_ANSWER_S and time.monotonic() - began < SLACK_S, f"an answer took {slowest:.2f} s")
    return found


def _switch_on(address: str, path: str) -> None:
    order = {"on": True, "fps": None}
    head = {"Authorization": f"Bearer {TOKEN}"}
    request = urllib.request.Request(f"{address}/api/{path}", json.dumps(order).encode(), head)
    with urllib.request.urlopen(request, timeout=30):
        pass


def _answers(events: Path) -> tuple[dict[int, int], float]:
    """How often each status was answered, and the seconds of the slowest answer."""
    statuses: dict[int, int] = {}
    slowest = 0.0

    def visit(value: object) -> None:
        nonlocal slowest
        if isinstance(value, dict):
            if "status_code" in value and "elapsed" in value:
                statuses[value["status_code"]] = statuses.get(value["status_code"], 0) + 1
                slowest = max(slowest, value["elapsed"])
            for one in value.values():
                visit(one)
        elif isinstance(value, list):
            for one in value:
                visit(one)

    for line in events.read_text().splitlines() if events.exists() else ():
        visit(json.loads(line))
    return statuses, slowest
