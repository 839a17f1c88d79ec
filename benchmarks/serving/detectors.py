"""Detectors of one family behind the box's port for Frigate: late answers, memory, and whether answers are equal.

    OMP_NUM_THREADS=1 python -m benchmarks.serving.detectors NETWORK.onnx [--models 6] [--fps 1] [--minutes 60]

Of a network (YOLOX of 80 classes, as published) fine-tunes are made that differ in all their last convolutions, those
of the heads, as training the heads alone makes them. A box serves one of them, then all; a client for each sends frames
of a street, evenly spaced over time, and takes no answer for an error, as Frigate does after its 200 ms. Memory is PSS
of the box at the end; an answer is equal where it is the one that the box of its model alone gives. Prints JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import onnx
import yaml
import zmq

from benchmarks.machine import machine
from benchmarks.serving.camera_cost import SOURCE
from benchmarks.serving.footage import data_folder
from benchmarks.serving.own_work import processor_s

ENDPOINT = "tcp://127.0.0.1:18212"
ANSWER_BYTES, LATE_S, TIMEOUT_S, START_S, POLL_INTERVAL_S = 480, 0.2, 5.0, 180.0, 0.5
FRAMES, NOISE = 40, 0.02


def write_family(network: Path, folder: Path, count: int) -> list[Path]:
    """Fine-tunes of a network that differ in the last convolutions, by noise of NOISE deviations."""
    paths = []
    for number in range(count):
        model, draw = onnx.load(str(network)), np.random.default_rng(number)
        for tensor in model.graph.initializer:
            if "_preds." in tensor.name and len(tensor.dims) == 4:
                weight = onnx.numpy_helper.to_array(tensor)
                moved = weight + number * NOISE * weight.std() * draw.standard_normal(weight.shape)
                tensor.CopyFrom(onnx.numpy_helper.from_array(moved.astype(np.float32), tensor.name))
        paths.append(folder / f"m{number}.onnx")
        onnx.save(model, str(paths[-1]))
    return paths


def read_tensors(size: tuple[int, int]) -> list[np.ndarray]:
    """Frames of a street, uint8 (1, H, W, 3)."""
    tensors = []
    with av.open(str(data_folder() / SOURCE)) as container:
        for number, frame in enumerate(container.decode(video=0)):
            if number % 20 == 0:
                tensors.append(cv2.resize(frame.to_ndarray(format="rgb24"), size)[None])
    return tensors[:FRAMES]


class Client:
    """A REQ socket as Frigate's detector has it: it asks for its model, then sends tensors."""

    def __init__(self, name: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.REQ)
        self._socket.setsockopt(zmq.RCVTIMEO, round(1000 * TIMEOUT_S))
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(ENDPOINT)
        self._ask({"model_request": True, "model_name": f"{name}.onnx"})

    def _ask(self, header: dict[str, Any], *parts: bytes) -> bytes:
        self._socket.send_multipart([json.dumps(header).encode(), *parts])
        return self._socket.recv()

    def detect(self, tensor: np.ndarray) -> bytes:
        """The answer to a tensor."""
        return self._ask({"shape": list(tensor.shape), "dtype": "uint8"}, tensor.tobytes())

    def close(self) -> None:
        """End."""
        self._socket.close()


@contextlib.contextmanager
def serve(folder: Path, files: Sequence[Path]) -> Iterator[int]:
    """A box of these detectors, once it answers; its process."""
    bundle = folder / f"{files[-1].stem}-{len(files)}.safetensors"
    subprocess.run([sys.executable, "-m", "gemel", "pack", *map(str, files), "-o", str(bundle)], check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    config, token = folder / f"box{len(files)}.yaml", folder / "token"
    token.write_text("t" * 32)
    token.chmod(0o600)
    config.write_text(yaml.safe_dump({
        "bundle": str(bundle), "budget": "1GiB", "engine": "onnx", "zmq": ENDPOINT,
        "cameras": {one.stem: {"source": "push"} for one in files},
        "http": {"bind": "127.0.0.1:18213", "token_file": str(token)},
    }))  # fmt: skip
    with subprocess.Popen([sys.executable, "-m", "gemel", "run", str(config)], stdout=subprocess.DEVNULL) as process:
        try:
            ends, tensor = time.monotonic() + START_S, read_tensors((416, 416))[0]
            for one in files:
                while True:
                    if process.poll() is not None or time.monotonic() > ends:
                        sys.exit("the box does not answer")
                    with contextlib.suppress(zmq.Again):  # it does not listen yet
                        client = Client(one.stem)
                        answer = client.detect(tensor)
                        client.close()
                        if len(answer) == ANSWER_BYTES:
                            break
                    time.sleep(POLL_INTERVAL_S)
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)


def measure_memory(pid: int) -> dict[str, int]:
    """PSS and anonymous bytes of a process."""
    words = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]]
    return {word[0].rstrip(":"): 1024 * int(word[1]) for word in words if word[0] in ("Pss:", "Anonymous:")}


def ask_all(names: Sequence[str], tensors: Sequence[np.ndarray], fps: float, minutes: float) -> dict[str, Any]:
    """Answers, errors and seconds of clients that each send so many frames a second; by model the first answers."""
    took, outcomes, lock = list[float](), Counter[str](), threading.Lock()
    answers: dict[str, dict[int, bytes]] = {name: {} for name in names}
    began = time.monotonic() + 1

    def ask(place: int, name: str) -> None:
        client = Client(name)
        for number in range(round(60 * minutes * fps)):
            due = began + (number + place / len(names)) / fps
            time.sleep(max(0.0, due - time.monotonic()))
            sent = time.monotonic()
            answer = client.detect(tensors[number % len(tensors)])
            seconds, is_answer = time.monotonic() - sent, len(answer) == ANSWER_BYTES
            with lock:
                took.append(seconds)
                outcomes["late" if seconds > LATE_S else "answered" if is_answer else "declined"] += 1
                if not is_answer:
                    print(f"{sent - began:.0f} s: {name}: {answer[:200]!r}", file=sys.stderr, flush=True)
                elif answers[name].setdefault(number % len(tensors), answer) != answer:
                    outcomes["changed"] += 1
        client.close()

    threads = [threading.Thread(target=ask, args=pair) for pair in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ms = [1000 * one for one in took]
    parts = {f"p{part:g}": round(float(np.percentile(ms, part)), 1) for part in (50, 99, 99.9, 100)}
    return {"asked": len(took), **outcomes, "ms": parts, "answers": answers}


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", type=Path)
    parser.add_argument("--models", type=int, default=6)
    parser.add_argument("--fps", type=float, default=1.0)
    parser.add_argument("--minutes", type=float, default=60.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gemel-") as name:
        folder = Path(name)
        files, tensors = write_family(given.network, folder, given.models), read_tensors((416, 416))
        alone, memory = list[dict[int, bytes]](), list[dict[str, int]]()
        for file in files:
            with serve(folder, [file]) as pid:
                found = ask_all([file.stem], tensors, 5.0, FRAMES / 300)
                alone.append(found["answers"][file.stem])
                memory.append(measure_memory(pid))
        with serve(folder, files) as pid:
            time.sleep(1)
            spent, begun = processor_s(pid), time.monotonic()
            row = ask_all([file.stem for file in files], tensors, given.fps, given.minutes)
            share, held = (processor_s(pid) - spent) / (time.monotonic() - begun), measure_memory(pid)
    together = list(row.pop("answers").values())
    pairs = [(one[key], other.get(key)) for one, other in zip(together, alone, strict=True) for key in one]
    one = {key: round(sum(each[key] for each in memory) / len(memory)) for key in memory[0]}
    print(json.dumps({
        "command": f"python -m benchmarks.serving.detectors NETWORK --fps {given.fps:g} --minutes {given.minutes:g}",
        "network": given.network.name, "models": given.models, "fps": given.fps, "minutes": given.minutes, **row,
        "compared": len(pairs), "equal": sum(first == second for first, second in pairs),
        "different_models": len({answers.get(0) for answers in together}), "core_share": round(share, 3),
        "one": one, "all": held, "pss_ratio": round(held["Pss"] / one["Pss"], 3),
        "anonymous_ratio": round(held["Anonymous"] / one["Anonymous"], 3), "machine": machine(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
