"""The pictures of the dashboard in docs: a real box on the demo's clips, as all is well and as things fail.

    gemel demo --out out/demo
    python -m tests.edge_runtime.http.screenshots out/demo -o docs

One camera is over RTSP, the others are files; results go to a file and to a webhook. Then that camera and the webhook
are taken away. Needs Chromium. The clips are rendered: no picture here shows a real place.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import av
import yaml

from edge_runtime.daemon import run
from tests.browsing import opened_browser, written
from tests.edge_runtime.capture.faulty_cameras import RtspCamera, units_of

SCREENS = {"desk": 1280, "phone": 390}
SCHEMES = ("light", "dark")
KEPT = {
    "well-desk-light": "dashboard",
    "failing-desk-dark": "dashboard-failing",
    "failing-phone-light": "dashboard-phone",
}
"""Those that stand in docs, and under which name."""
READY_S, SETTLE_S, FAIL_S = 120.0, 45.0, 20.0
REMOTE = "square"


class ClipCamera(RtspCamera):
    """Plays the beginning of a clip over RTSP, again and again."""

    def __init__(self, clip: Path, frames: int = 150) -> None:
        with av.open(str(clip)) as opened:
            stream = opened.streams.video[0]
            found = [frame.to_ndarray(format="rgb24") for frame, _ in zip(opened.decode(stream), range(frames))]
            rate = float(stream.average_rate or 25)
        self._units = units_of(found)
        super().__init__(rate, (found[0].shape[1], found[0].shape[0]))

    def film(self) -> list[list[bytes]]:
        return self._units


class _Taking(BaseHTTPRequestHandler):
    """Takes every result."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def config_of(demo: Path, folder: Path, camera: RtspCamera, hook: int) -> Path:
    """The config of a box on the demo's bundle, within the budget of the demo."""
    given = yaml.safe_load((demo / "workload.yaml").read_text())["cameras"]
    budget = yaml.safe_load((demo / "box.yaml").read_text())["budget"]
    cameras: dict[str, Any] = {
        name: {"source": str((demo / one["source"]).resolve()), "fps": one["fps"], "loop": True}
        for name, one in given.items()
    }
    cameras[REMOTE] = {"source": camera.url, "fps": 5, "timeout_s": 3}
    document = {
        "bundle": str((demo / "sample.safetensors").resolve()), "budget": budget, "device": "cpu", "cameras": cameras,
        "sinks": [{"kind": "jsonl", "path": "results.jsonl"}, {"kind": "webhook", "url": f"http://127.0.0.1:{hook}/"}],
        "http": {"bind": "127.0.0.1:8099"},
    }  # fmt: skip
    path = folder / "box.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@contextmanager
def box_at_work(demo: Path) -> Iterator[tuple[str, RtspCamera, ThreadingHTTPServer]]:
    """The address of a dashboard, and what can fail."""
    hook = ThreadingHTTPServer(("127.0.0.1", 0), _Taking)
    threading.Thread(target=hook.serve_forever, daemon=True).start()
    stop = threading.Event()
    with tempfile.TemporaryDirectory() as folder, ClipCamera(demo / "clips" / f"{REMOTE}.mp4") as camera:
        config = config_of(demo, Path(folder), camera, hook.server_address[1])
        working = threading.Thread(target=run, args=(config,), kwargs={"stop": stop})
        working.start()
        try:
            yield "http://127.0.0.1:8099/", camera, hook
        finally:
            stop.set()
            working.join()


def until(address: str, path: str, most_s: float, wanted: Any) -> None:
    """Ask until the answer is as wanted."""
    ends = time.monotonic() + most_s
    while time.monotonic() < ends:
        try:
            with urllib.request.urlopen(address + path, timeout=5) as answer:
                if wanted(json.load(answer)):
                    return
        except OSError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"{path} is not as it should be after {most_s} s")


def shot(browser: Any, address: str, width: int, scheme: str) -> bytes:
    """A PNG of the whole page."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.goto(address)
    page.wait_for_selector("#age-curve canvas")
    page.wait_for_selector(".camera:nth-child(3) img[src]")
    page.wait_for_timeout(1500)
    data = page.screenshot(full_page=True)
    context.close()
    return data


def main() -> None:
    """Take them."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("demo", type=Path, help="what `gemel demo` made")
    given.add_argument("-o", "--out", type=Path, default=Path("docs"))
    given.add_argument("--all", action="store_true", help="every screen in every scheme, not only those of the docs")
    args = given.parse_args()
    with opened_browser() as browser, box_at_work(args.demo) as (address, camera, hook):
        until(address, "readyz", READY_S, lambda said: not said["missing"])
        time.sleep(SETTLE_S)
        for state in ("well", "failing"):
            if state == "failing":
                camera.refuse()
                hook.shutdown()
                hook.server_close()
                until(address, "api/status", FAIL_S, lambda said: any(one["state"] == "down" for one in said["sinks"])
                      and any(not one["up"] for one in said["cameras"]))  # fmt: skip
                time.sleep(FAIL_S)
            for screen, width in SCREENS.items():
                for scheme in SCHEMES:
                    name = f"{state}-{screen}-{scheme}"
                    if args.all or name in KEPT:
                        written(shot(browser, address, width, scheme), args.out / f"{KEPT.get(name, name)}.png")


if __name__ == "__main__":
    main()
