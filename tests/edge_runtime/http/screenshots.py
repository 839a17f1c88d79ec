"""The pictures of the dashboard in docs: a box on the demo's clips, as all is well and as things fail.

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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import av
import yaml

from tests.browser import open_browser, page_of, save_small_png
from tests.edge_runtime.capture.faulty_cameras import RtspCamera, encode_pictures
from tests.edge_runtime.running import Running

PICTURES = {
    "dashboard": ("well", 1280, "light"),
    "dashboard-failing": ("failing", 1280, "dark"),
    "dashboard-phone": ("failing", 390, "light"),
}
PHONE, MAX_HEIGHT = 600, 1300
READY_S, SETTLE_S, DRAWN_MS = 300.0, 60.0, 120_000
REMOTE, FRAMES, FPS = "square", 150, 2.5
EVENTS = {
    "day-vehicles": {
        "tracking": True, "zones": {"lane": [[0, 0.4], [0.6, 0.4], [0.6, 1], [0, 1]]},
        "events": [{"kind": "enter", "zone": "lane"}, {"kind": "dwell", "zone": "lane", "seconds": 4}],
    }
}  # fmt: skip


class _Hook(BaseHTTPRequestHandler):
    """Takes every result."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class ClipCamera(RtspCamera):
    """Shows the first frames of a clip over RTSP, again and again."""

    def __init__(self, clip: Path) -> None:
        with av.open(str(clip)) as file:
            pictures = [frame.to_ndarray(format="rgb24") for frame, _ in zip(file.decode(video=0), range(FRAMES))]
            rate = float(file.streams.video[0].average_rate or 25)
        self._film = encode_pictures(pictures)
        super().__init__(rate, pictures[0].shape[1::-1])

    def film(self) -> list[list[bytes]]:
        return self._film


def box_keys(demo: Path, camera: RtspCamera, hook: int) -> dict[str, Any]:
    """The config of a box on the demo's bundle, within the demo's budget."""
    given = yaml.safe_load((demo / "box.yaml").read_text())
    cameras = {
        name: {"source": str((demo / "clips" / f"{name}.mp4").resolve()), "fps": FPS, "loop": True}
        for name in given["cameras"]
    }
    cameras[REMOTE] = {"source": camera.url, "fps": FPS, "timeout_s": 3}
    return {
        "name": "north-gate", "bundle": str((demo / "sample.safetensors").resolve()), "budget": given["budget"],
        "engine": "auto", "factories": None, "cameras": cameras, "queries": EVENTS, "clips": "clips",
        "sinks": [{"kind": "jsonl", "path": "results.jsonl"}, {"kind": "webhook", "url": f"http://127.0.0.1:{hook}/"}],
        "http": {"bind": "127.0.0.1:0"},
    }  # fmt: skip


def take_picture(browser: Any, address: str, width: int, scheme: str) -> bytes:
    """A PNG of the page, of a wide one its first MAX_HEIGHT."""
    with page_of(browser, width, scheme) as (page, _):
        page.goto(f"{address}/")
        page.wait_for_selector("#age-curve canvas", state="attached", timeout=DRAWN_MS)
        page.wait_for_selector(".camera:nth-child(3) img[src]", timeout=DRAWN_MS)
        page.wait_for_timeout(3000)
        if width < PHONE:
            return page.screenshot(full_page=True)
        return page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": width, "height": MAX_HEIGHT})


def main() -> None:
    """Take them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path, help="what `gemel demo` made")
    parser.add_argument("-o", "--out", type=Path, default=Path("docs"))
    given = parser.parse_args()
    hook = ThreadingHTTPServer(("127.0.0.1", 0), _Hook)
    threading.Thread(target=hook.serve_forever, daemon=True).start()
    with (
        tempfile.TemporaryDirectory() as folder,
        ClipCamera(given.demo / "clips" / f"{REMOTE}.mp4") as camera,
        Running(Path(folder), **box_keys(given.demo, camera, hook.server_address[1])) as box,
        open_browser() as browser,
    ):
        box.until(lambda: not json.loads(box.get("/readyz"))["missing"], READY_S)
        time.sleep(SETTLE_S)
        are_well = True
        for name, (state, width, scheme) in PICTURES.items():
            if state == "failing" and are_well:
                are_well = False
                camera.refuse()
                hook.shutdown()
                hook.server_close()
                time.sleep(SETTLE_S / 2)
            save_small_png(take_picture(browser, box.address(), width, scheme), given.out / f"{name}.png")


if __name__ == "__main__":
    main()
