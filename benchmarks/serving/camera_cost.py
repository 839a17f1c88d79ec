"""What cameras cost: a whole box beside FFmpeg that decodes the same and a bare loop that runs the same frames.

    OMP_NUM_THREADS=1 python -m benchmarks.serving.camera_cost NETWORK.onnx [--cameras 8] [--asked 5] [--skip nonref]
    OMP_NUM_THREADS=1 python -m benchmarks.serving.camera_cost --table

Footage of `benchmarks.serving.footage` is encoded as a camera does. The box plays a clip for each camera; its processor
time between two moments is divided by that of its decoded frames in FFmpeg (PyAV, as many streams at once and as fast,
a thread each) and of its answered frames in the loop (colour, OpenCV's resize, a plain session of ONNX Runtime). Both
are measured before and after the box, in one run. `--table` gives milliseconds of a decoded frame by codec and size.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import onnxruntime
import yaml

from benchmarks.machine import machine
from benchmarks.serving.footage import data_folder
from benchmarks.serving.own_work import processor_s

SOURCE = "videos/ozlu_street/input_video.mp4"
SIZES = {"640x360": (640, 360), "1280x720": (1280, 720), "1920x1080": (1920, 1080)}
MBIT_S = {"640x360": 0.8, "1280x720": 2.0, "1920x1080": 4.0}
CODECS: dict[str, dict[str, str]] = {
    "H.264": {"codec": "libx264", "preset": "veryfast", "bf": "0"},
    "H.264, B frames": {"codec": "libx264", "preset": "veryfast", "bf": "3"},
    "H.265": {"codec": "libx265", "preset": "superfast", "x265-params": "log-level=none:bframes=0"},
    "AV1": {"codec": "libsvtav1", "preset": "10"},
    "MJPEG": {"codec": "mjpeg"},
}
FPS, GOP, FRAMES, REPEATS = 25, 50, 150, 40
START_S, SETTLE_S, DECODE_S = 180.0, 8.0, 12.0
PORT = 18211


def write_footage(path: Path, codec: str, size: str, frames: int = FRAMES, slow: int = 1) -> None:
    """So many frames of the street as a camera sends them, at FPS with a key frame every two seconds, played so many
    times slower."""
    options = dict(CODECS[codec])
    width, height = SIZES[size]
    with av.open(str(path), "w", format="matroska") as file:
        stream: Any = file.add_stream(options.pop("codec"), Fraction(FPS, slow), options=options | {"g": str(GOP)})
        stream.width, stream.height, stream.bit_rate = width, height, round(1e6 * MBIT_S[size] / slow)
        stream.pix_fmt = "yuvj420p" if codec == "MJPEG" else "yuv420p"
        if codec == "MJPEG":
            stream.bit_rate *= 5
        number = 0
        while number < frames:
            with av.open(str(data_folder() / SOURCE)) as footage:
                for frame in footage.decode(video=0):
                    picture = frame.reformat(width, height, stream.pix_fmt)
                    picture.pts, picture.time_base, picture.pict_type = number, Fraction(slow, FPS), 0
                    file.mux(stream.encode(picture))
                    number += 1
                    if number == frames:
                        break
        file.mux(stream.encode())


def repeat_footage(clip: Path, path: Path, times: int = REPEATS) -> None:
    """The packets of a clip one time after the other, so that the box does not open it anew all the time."""
    with av.open(str(path), "w", format="matroska") as file:
        out, offset = None, 0
        for _ in range(times):
            with av.open(str(clip)) as container:
                stream = container.streams.video[0]
                out = out or file.add_stream_from_template(stream)
                last = 0
                for packet in container.demux(stream):
                    if packet.dts is None or packet.pts is None:
                        continue
                    last = max(last, packet.pts + (packet.duration or 0))
                    packet.pts, packet.dts, packet.stream = packet.pts + offset, packet.dts + offset, out
                    file.mux(packet)
                offset += last


def decode_ms(path: Path, skip: str = "DEFAULT") -> float:
    """Milliseconds of FFmpeg, on one thread, for a packet of a clip."""
    packets, begun = 0, time.process_time()
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count, stream.codec_context.skip_frame = 1, skip
        for packet in container.demux(stream):
            packet.decode()
            packets += 1
    return 1000 * (time.process_time() - begun) / packets


def decode_together_ms(path: Path, streams: int, fps: float) -> float:
    """The same, of so many streams at once, each so fast: they share the processor's caches, as in a box."""
    frames = round(DECODE_S * fps)
    began = time.monotonic()

    def play() -> None:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1
            for number, packet in enumerate(itertools.islice(container.demux(stream), frames)):
                time.sleep(max(0.0, began + number / fps - time.monotonic()))
                packet.decode()

    spent, threads = time.process_time(), [threading.Thread(target=play) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 1000 * (time.process_time() - spent) / (streams * frames)


def run_ms(path: Path, network: Path, count: int = 60) -> float:
    """Milliseconds of a bare loop for a frame that it runs, its decoding left out."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(str(network), options)
    entrance = session.get_inputs()[0]
    height, width = entrance.shape[2:]
    frames = []
    with av.open(str(path)) as container:
        for number, frame in enumerate(container.decode(video=0)):
            if number % 12 == 0:
                frames.append(frame)
    session.run(None, {entrance.name: np.zeros((1, 3, height, width), np.float32)})
    begun = time.process_time()
    for number in range(count):
        picture = cv2.resize(frames[number % len(frames)].to_ndarray(format="rgb24"), (width, height))
        session.run(None, {entrance.name: np.ascontiguousarray(picture.transpose(2, 0, 1)[None], np.float32)})
    return 1000 * (time.process_time() - begun) / count


def read_status() -> dict[str, Any]:
    """The status of the box."""
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/api/status", timeout=20) as answer:
        return json.load(answer)


def write_box(folder: Path, clip: Path, network: Path, cameras: int, asked: float, skip: str) -> Path:
    """A packed bundle of the network for each camera, and the config of its box."""
    names = [f"c{number}" for number in range(cameras)]
    for name in names:
        shutil.copy(network, folder / f"{name}.onnx")
    files = [str(folder / f"{name}.onnx") for name in names]
    subprocess.run([sys.executable, "-m", "gemel", "pack", *files, "-o", str(folder / "box.safetensors")], check=True)
    camera = {"source": str(clip), "loop": True, "fps": asked, "skip": skip}
    document = {
        "bundle": "box.safetensors", "budget": "1GiB", "engine": "onnx", "cameras": dict.fromkeys(names, camera),
        "sinks": [{"kind": "jsonl", "path": "results.jsonl"}], "http": {"bind": f"127.0.0.1:{PORT}"},
    }  # fmt: skip
    path = folder / "box.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def measure_box(config: Path, seconds: float) -> dict[str, Any]:
    """What a box took between two moments: processor seconds, frames decoded and answered, seconds by part."""
    with subprocess.Popen([sys.executable, "-m", "gemel", "run", str(config)], stdout=subprocess.DEVNULL) as process:
        ends = time.monotonic() + START_S
        while time.monotonic() < ends:
            time.sleep(0.5)
            try:
                if all(one["fps"] for one in read_status()["cameras"]):
                    break
            except OSError:
                continue
        time.sleep(SETTLE_S)
        spent, before = processor_s(process.pid), read_status()
        time.sleep(seconds)
        spent, after = processor_s(process.pid) - spent, read_status()
        process.send_signal(signal.SIGTERM)

    def sum_of(status: dict[str, Any], kind: str) -> int:
        if kind == "decoded":
            return sum(one["decoded"] for one in status["cameras"])
        return sum(one["ledger"][kind] for one in status["queries"])

    parts = {part: round(after["seconds"][part] - value, 2) for part, value in before["seconds"].items()}
    counts = {kind: sum_of(after, kind) - sum_of(before, kind) for kind in ("decoded", "received", "processed")}
    return {"box_s": round(spent, 2), **counts, "parts_s": parts, "skip": after["cameras"][0]["skip"]}


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", type=Path, nargs="?")
    parser.add_argument("--cameras", type=int, default=8)
    parser.add_argument("--asked", type=float, default=5.0)
    parser.add_argument("--codec", choices=CODECS, default="H.264")
    parser.add_argument("--size", choices=SIZES, default="1920x1080")
    parser.add_argument("--skip", default="auto")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--slow", type=int, default=1, help="all rates divided by this, for a machine that is busy")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gemel-") as name:
        clip = Path(name) / "clip.mkv"
        if given.table:
            for codec in CODECS:
                for size in SIZES:
                    write_footage(clip, codec, size, 2 * GOP)
                    row = {skip: round(decode_ms(clip, skip), 2) for skip in ("DEFAULT", "NONREF", "NONKEY")}
                    mbit_s = clip.stat().st_size * 8 * FPS / (2 * GOP) / 1e6
                    print(json.dumps({"codec": codec, "size": size, "mbit_s": round(mbit_s, 1), **row}), flush=True)
            return
        write_footage(clip, given.codec, given.size, slow=given.slow)
        repeat_footage(clip, long := Path(name) / "long.mkv")
        config = write_box(Path(name), long, given.network, given.cameras, given.asked / given.slow, given.skip)
        rate = FPS / given.slow
        bare = [(decode_together_ms(long, given.cameras, rate), run_ms(clip, given.network))]
        box = measure_box(config, given.seconds)
        bare.append((decode_together_ms(long, given.cameras, rate), run_ms(clip, given.network)))
        alone = decode_ms(clip)
    decoding, running = (sum(column) / len(bare) for column in zip(*bare, strict=True))
    ideal_s = (box["decoded"] * decoding + box["processed"] * running) / 1000
    print(json.dumps({
        "cameras": given.cameras, "asked_fps": given.asked, "slow": given.slow, "codec": given.codec,
        "size": given.size,
        "decode_ms": round(decoding, 2), "decode_alone_ms": round(alone, 2), "run_ms": round(running, 2), **box,
        "ideal_s": round(ideal_s, 2),
        "ratio": round(box["box_s"] / ideal_s, 3), "machine": machine(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
