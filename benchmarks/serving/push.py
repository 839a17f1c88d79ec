"""Frames by HTTP: a box's latency beside ONNX Runtime behind a bare aiohttp handler, its rate, and what overload loses.

Usage: python -m benchmarks.serving.push [--frames 200] [--model resnet18] [--out FILE]

One query (random weights) answers a JPEG of 640 x 360 over the loopback, once by `gemel run` with the engine onnx, once
by an aiohttp handler around a session of the same exported file: OpenCV decodes and resizes, the answer is a label.
Each server has a process, one thread of ONNX Runtime and DeepStack's form. Requests alternate between the two, so that
both see the same machine. The overload sends four times the rate that four clients reach, or one alone if that
is more, by the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import aiohttp
import cv2
import numpy as np
import torch
import yaml
from aiohttp import web

from benchmarks.machine import machine
from gemel.models import zoo
from gemel.models.bundle import BundleQuery, Made, open_bundle, write_bundle
from gemel.models.export.query_export import export_query
from gemel.models.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess

TOKEN = "benchmark-token-of-32-characters"
CLASSES, SIDE = tuple(f"class-{index}" for index in range(10)), 224
QUERY, FRAME = "kind", (360, 640)
CLIENTS, RATE_S, OVERLOAD, OVERLOAD_S = 4, 8.0, 4.0, 8.0
START_TIMEOUT_S, REQUEST_TIMEOUT_S = 120.0, 30.0
BARE, BOX = "bare", "box"


def main() -> None:
    """Run it and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=200)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_bare(options.serve)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.model, options.frames)
    record = {
        "command": "python -m benchmarks.serving.push", "date": f"{date.today()}", "machine": machine(),
        "rows": [found],
    }  # fmt: skip
    text = json.dumps(record, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


def measure(folder: Path, model: str, frames: int) -> dict[str, Any]:
    """All figures, of servers that are started here."""
    write_files(folder, model)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    bare = [sys.executable, "-m", "benchmarks.serving.push", "--serve", str(folder / f"{QUERY}.onnx")]
    box = [sys.executable, "-m", "gemel", "run", str(folder / "box.yaml")]
    with (
        open(folder / "bare.txt", "wb") as bare_log,
        open(folder / "box.txt", "wb") as box_log,
        subprocess.Popen(bare, env=environment, stdout=bare_log) as first,
        subprocess.Popen(box, env=environment, stderr=box_log) as second,
    ):
        try:
            addresses = {
                BARE: wait_address(folder / "bare.txt", r"at (http://\S+)"),
                BOX: wait_address(folder / "box.txt", r"dashboard at (http://\S+)/"),
            }
            return asyncio.run(_measure(addresses, jpeg(), model, frames))
        finally:
            first.terminate()
            second.terminate()


def write_files(folder: Path, model: str) -> None:
    """A bundle of one query, the same as an ONNX file, and the config of a box."""
    torch.manual_seed(0)
    query = BundleQuery(
        id=QUERY, camera="door", task="classification", classes=CLASSES, model=model, model_args={}, input_size=SIDE,
        preprocess=Preprocess((SIDE, SIDE)), fps=None, sla_ms=5000.0, accuracy_target=0.95,
    )  # fmt: skip
    network = zoo.build(model, CLASSES, {}, SIDE, "classification").eval()
    write_bundle(folder / "b.safetensors", {QUERY: network}, [query], Made("push", "none", 0))
    export_query(open_bundle(folder / "b.safetensors"), QUERY, folder / f"{QUERY}.onnx")
    (folder / "token").write_text(TOKEN)
    config = {
        "bundle": "b.safetensors", "budget": "512MiB", "device": "cpu", "engine": "onnx",
        "cameras": {"door": {"source": "push", "timeout_s": 20}},
        "sinks": [{"kind": "jsonl", "path": "results.jsonl"}],
        "http": {"bind": "127.0.0.1:0", "token_file": "token"},
    }  # fmt: skip
    (folder / "box.yaml").write_text(yaml.safe_dump(config))


def jpeg() -> bytes:
    """A picture with the detail of a street: smooth areas and noise."""
    random = np.random.default_rng(0)
    small = random.integers(0, 256, (12, 20, 3), np.uint8)
    picture = cv2.resize(small, FRAME[::-1], interpolation=cv2.INTER_CUBIC).astype(np.int16)
    picture += random.integers(-8, 9, picture.shape, np.int16)
    return cv2.imencode(".jpg", picture.clip(0, 255).astype(np.uint8))[1].tobytes()


def serve_bare(path: Path) -> None:
    """The rival: a session and a handler."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    mean, std = (np.array(one, np.float32) for one in (IMAGENET_MEAN, IMAGENET_STD))

    async def detect(request: web.Request) -> web.Response:
        form = await request.post()
        image = form["image"]
        data = np.frombuffer(image.file.read(), np.uint8)  # type: ignore[union-attr]
        picture = cv2.imdecode(data, cv2.IMREAD_COLOR_RGB)
        assert picture is not None
        small = cv2.resize(picture, (SIDE, SIDE), interpolation=cv2.INTER_LINEAR)
        batch = np.ascontiguousarray(((small.astype(np.float32) / 255 - mean) / std).transpose(2, 0, 1)[None])
        scores = np.exp(session.run(None, {name: batch})[0][0])  # type: ignore[index]
        best = int(scores.argmax())
        prediction = {"label": CLASSES[best], "confidence": float(scores[best] / scores.sum())}
        return web.json_response({"success": True, "predictions": [prediction]})

    app = web.Application(client_max_size=2**24)
    app.router.add_post(f"/v1/vision/custom/{QUERY}", detect)

    async def run() -> None:
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(f"at http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.Event().wait()

    asyncio.run(run())


def wait_address(path: Path, pattern: str) -> str:
    """The address that a server prints once it listens."""
    ends = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < ends:
        if found := re.search(pattern, path.read_text()):
            return found[1]
        time.sleep(0.1)
    raise SystemExit(f"no server: {path.read_text()[-1000:]}")


async def _measure(addresses: dict[str, str], picture: bytes, model: str, frames: int) -> dict[str, Any]:
    connector = aiohttp.TCPConnector(limit=32)
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def ask(server: str) -> int:
            form = aiohttp.FormData({"api_key": TOKEN})
            form.add_field("image", picture, filename="image", content_type="image/jpeg")
            async with session.post(f"{addresses[server]}/v1/vision/custom/{QUERY}", data=form) as response:
                text = await response.text()
                if response.status not in (200, 429):
                    print(text[:200], file=sys.stderr)
                return response.status

        for server in addresses:
            ends = time.monotonic() + START_TIMEOUT_S
            while await ask(server) != 200 and time.monotonic() < ends:
                await asyncio.sleep(0.2)
            for _ in range(10):
                await ask(server)
        latencies = await measure_latencies(ask, frames)
        rates = {server: await measure_rate(ask, server) for server in addresses}
        quantiles = {server: quantile_ms(values) for server, values in latencies.items()}
        capacity = max(rates[BOX], 1000 / quantiles[BOX]["median"])
        overload = await measure_overload(ask, OVERLOAD * capacity)
    return {
        "model": model, "frames": frames, "picture_bytes": len(picture), "latency_ms": quantiles,
        "latency_ratio": {
            "median": round(quantiles[BOX]["median"] / quantiles[BARE]["median"], 3),
            "paired_median": round(statistics.median(map(_ratio, latencies[BOX], latencies[BARE])), 3),
        },
        "requests_a_second": {server: round(rate, 1) for server, rate in rates.items()},
        "clients": CLIENTS, "overload": {**overload, "ledger": read_ledger(addresses[BOX])},
    }  # fmt: skip


def _ratio(one: float, other: float) -> float:
    return one / other


def quantile_ms(seconds: list[float]) -> dict[str, float]:
    """Median and 95th percentile."""
    return {
        "median": round(1000 * statistics.median(seconds), 2), "p95": round(1000 * float(np.quantile(seconds, 0.95)), 2)
    }  # fmt: skip


async def measure_latencies(ask: Callable[[str], Any], frames: int) -> dict[str, list[float]]:
    """Seconds of requests one after the other, alternating between the servers."""
    found: dict[str, list[float]] = {BARE: [], BOX: []}
    for turn in range(frames):
        for server in (BARE, BOX) if turn % 2 else (BOX, BARE):
            start = time.perf_counter()
            status = await ask(server)
            found[server].append(time.perf_counter() - start)
            if status != 200:
                raise SystemExit(f"{server} answers {status}")
    return found


async def measure_rate(ask: Callable[[str], Any], server: str) -> float:
    """Answers a second to clients that ask again at once."""
    ends, answered = time.monotonic() + RATE_S, 0

    async def ask_on() -> None:
        nonlocal answered
        while time.monotonic() < ends:
            answered += await ask(server) == 200

    await asyncio.gather(*(ask_on() for _ in range(CLIENTS)))
    return answered / RATE_S


async def measure_overload(ask: Callable[[str], Any], rate: float) -> dict[str, Any]:
    """Requests at a rate, and how many got which status; `lost` are those without any."""
    start, statuses, asked = time.monotonic(), Counter[str](), []

    async def ask_once() -> None:
        try:
            statuses[str(await ask(BOX))] += 1
        except (aiohttp.ClientError, asyncio.TimeoutError):
            statuses["lost"] += 1

    for index in range(round(rate * OVERLOAD_S)):
        await asyncio.sleep(max(0.0, start + index / rate - time.monotonic()))
        asked.append(asyncio.create_task(ask_once()))
    await asyncio.gather(*asked)
    return {"asked_a_second": round(rate, 1), "asked": len(asked), "lost": 0, **dict(sorted(statuses.items()))}


def read_ledger(address: str) -> dict[str, Any]:
    """The query's counts."""
    request = urllib.request.Request(f"{address}/api/status", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
        return json.load(response)["queries"][0]["ledger"]


if __name__ == "__main__":
    main()
