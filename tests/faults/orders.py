"""Orders to a real box: two clients that contradict each other, wrong ones between, kills while they write."""

from __future__ import annotations

import itertools
import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

from tests.edge_runtime.events.bright import BRIGHT, PARTS, write_spot_box
from tests.edge_runtime.running import Running, adds_up
from tests.faults.cameras import HTTP
from tests.faults.scenario import Found, Tell

TOKEN = "a-token-of-32-characters-or-more"
INTERVAL_S = 0.5
RULES = {"tracking": True, **PARTS, "events": [{"kind": "enter", "zone": "right"}]}
RIGHT = {
    "one": [{"fps": 4.0}, {"on": False}, {"on": True, "min_score": 0.5}],
    "other": [{"fps": 8.0}, {"zones": {"right": [[0.5, 0], [1, 0], [1, 1]]}}, {"zones": None, "min_score": None}],
}
WRONG = [{"fps": 400}, {"zones": {"nowhere": [[0, 0], [1, 0], [1, 1]]}}, {"on": 1}, {"speed": 2}, {"min_score": 2}]
"""More than the camera gives, an unknown zone, no switch, an unknown key, no score."""


def contradict(folder: Path, seconds: int, tell: Tell) -> Found:
    """Two clients set the same query twice a second, other orders are wrong, and a kill ends the box."""
    write_spot_box(folder, [None, *range(0, 28, 2)], {"spot": RULES})
    (folder / "token").write_text(TOKEN)
    cameras = {"left": {"source": "clip", "fps": 20, "loop": True}}
    keys = {"bundle": "spots.safetensors", "factories": [BRIGHT, "tests.edge_runtime.tiny:net"], "cameras": cameras,
            "queries": {"spot": RULES}, "http": {**HTTP, "token_file": "token"}}  # fmt: skip
    seen, lock, found = Counter[str](), threading.Lock(), Found()
    with Running(folder, **keys) as box:
        address = box.address()
        box.until(box.news)

        def order(name: str, keys: object) -> None:
            head = {"Authorization": f"Bearer {TOKEN}"}
            request = urllib.request.Request(f"{address}/api/queries/{name}", json.dumps(keys).encode(), head)
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    status = answer.status
            except urllib.error.HTTPError as error:
                status = error.code
            with lock:
                seen[f"{name} {status}"] += 1

        def contradict(orders: list[dict[str, object]]) -> None:
            ends = time.monotonic() + seconds
            for right, wrong in zip(itertools.cycle(orders), itertools.cycle(WRONG), strict=False):
                order("spot", right)
                order("spot", wrong)
                order("gone", right)
                if time.monotonic() >= ends:
                    return
                time.sleep(INTERVAL_S)

        clients = [threading.Thread(target=contradict, args=(orders,)) for orders in RIGHT.values()]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        tell(str(dict(seen)))
        order("spot", {"on": True, "fps": 5.0})
        before = _read_changed(box)
        box.kill()
    with Running(folder, **keys) as box:
        box.until(box.news)
        after = _read_changed(box)
        ended, summary = box.stop(), box.ledger()
    right = sum(count for key, count in seen.items() if key == "spot 200")
    found.said = (
        f"{seen.total()} orders: {right} held, {seen['spot 400']} wrong ones refused, {seen['gone 404']} of none"
    )
    found.figures = dict(seen)
    found.hold(set(seen) == {"spot 200", "spot 400", "gone 404"}, f"other answers: {dict(seen)}")
    found.hold(before == after and after.get("fps") == 5.0, f"a kill has changed {before} to {after}")
    found.hold(ended == 0 and adds_up(summary), "the ledger does not add up")
    return found


def _read_changed(box: Running) -> dict[str, object]:
    return next(query["changed"] for query in box.status()["queries"] if query["id"] == "spot")
