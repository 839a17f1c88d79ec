"""One way to serve a workload's files, in a process of its own: memory, time, outputs and frames in time as JSON.

    python benchmarks/compare/child.py REQUEST.json

The request has `way`, `files` {model: path}, `inputs` {model: .npz}, and either `rates`, `seconds` and `answers` (an
.npz to write) or `limit_mb`, for the replay. Needs NumPy and what the way needs, and nothing of this project but for
Gemel's own ways: rivals run in environments of their own. Every session has one thread. Time is processor time, so that
what else the machine does counts for none.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

WARM_RUNS = 3
MB = 1e6
WORKFLOWS, MIN_CHAIN, MAX_CHAIN, REQUESTS_AN_HOUR = 6, 3, 5, 450
"""Of roboflow/inference issue 2448: about six workflows of three to five models each, 200 to 700 loads an hour."""
REPLAY_S = 900
"""Seconds of the hour that are replayed; reloads are counted for the whole."""


@dataclass(frozen=True)
class Pictures:
    """Pictures uint8 RGB (N, 3, H, W) of the size that a model takes, and how it wants them."""

    pictures: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    bgr: bool

    def prepare(self, picture: np.ndarray) -> np.ndarray:
        """A picture uint8 (3, H, W) as float32 (1, 3, H, W)."""
        values = (picture[::-1] if self.bgr else picture).astype(np.float32, order="C")
        if self.mean.any() or (self.std != 1).any():
            values -= self.mean[:, None, None]
            values /= self.std[:, None, None]
        return values[None]


def read_pictures(path: str) -> Pictures:
    """The pictures of a file that `benchmarks.compare.files` wrote."""
    with np.load(path) as arrays:
        return Pictures(arrays["pictures"], arrays["mean"], arrays["std"], bool(arrays["bgr"]))


class Sessions:
    """Plain sessions of ONNX Runtime, as its guide opens them."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.files = request["files"]

    def open(self, model: str) -> Any:
        """A session of this model on one thread, and the name of its input."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        session = onnxruntime.InferenceSession(self.files[model], options, providers=["CPUExecutionProvider"])
        return session, session.get_inputs()[0].name

    def run(self, opened: Any, picture: np.ndarray, inputs: Pictures) -> list[np.ndarray]:
        """The outputs for one picture."""
        session, name = opened
        return session.run(None, {name: inputs.prepare(picture)})


class OpenVino:
    """Compiled models of OpenVINO, each with one stream and one thread."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        import openvino  # pyright: ignore[reportMissingImports]

        self.files, self.core = request["files"], openvino.Core()

    def open(self, model: str) -> Any:
        """A compiled model's request for inference."""
        settings = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}
        return self.core.compile_model(self.files[model], "CPU", settings).create_infer_request()

    def run(self, opened: Any, picture: np.ndarray, inputs: Pictures) -> list[np.ndarray]:
        """The outputs for one picture."""
        return [np.array(value) for value in opened.infer([inputs.prepare(picture)]).values()]


class Gemel:
    """The sessions of a prepared bundle, as `gemel run` opens them."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        from gemel.edge_runtime.engines.prepare import prepare_bundle
        from gemel.edge_runtime.engines.prepared import WEIGHTS
        from gemel.edge_runtime.memory.pages import MappedWeights
        from gemel.models.bundle import open_bundle

        self.prepared = prepare_bundle(open_bundle(request["bundle"]))
        self.weights = MappedWeights(self.prepared.folder / WEIGHTS)

    def open(self, model: str) -> Any:
        """The session of a query."""
        from gemel.edge_runtime.engines.mapped_session import open_session
        from gemel.models.process import trim_heap

        session = open_session(self.prepared, model, self.weights)
        trim_heap()
        return session

    def run(self, opened: Any, picture: np.ndarray, inputs: Pictures) -> list[np.ndarray]:
        """The outputs for one picture."""
        return opened.run(inputs.prepare(picture))


class LitServe:
    """A server of LitServe that holds all models in its one worker, asked over HTTP."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        from served import Server  # pyright: ignore[reportMissingImports]

        environment = {"MODELS": json.dumps(request["files"]), "INPUTS": json.dumps(request["inputs"])}
        command = [sys.executable, str(Path(__file__).with_name("litserve_server.py"))]
        self.server = Server(command, environment, "/health")

    def open(self, model: str) -> str:
        """The model's name: the server has opened it."""
        return model

    def run(self, opened: str, picture: np.ndarray, inputs: Pictures) -> list[np.ndarray]:
        """The outputs of the server."""
        fields = {"model": opened, "shape": json.dumps(picture.shape)}
        return self.server.ask_form("/predict", fields, picture.tobytes())


class Box:
    """`gemel run` of a bundle whose cameras are pushed, asked by KServe's protocol; it answers with objects."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        from served import Server  # pyright: ignore[reportMissingImports]

        folder = Path(request["folder"])
        (folder / "token").write_text("compare-compare-compare-compare")
        config = folder / "box.yaml"
        lines = [f"bundle: {request['bundle']}", "budget: 2GiB", "sinks: [{kind: jsonl, path: /dev/null}]", "cameras:"]
        lines += [f"  {model}: {{source: push, timeout_s: 30}}" for model in request["files"]]
        config.write_text("\n".join([*lines, "http: {bind: 'PORT', token_file: token}", ""]))
        self.server = Server([sys.executable, "-m", "gemel", "run", str(config)], {}, "/v2/health/ready", config)
        self.token = "compare-compare-compare-compare"

    def open(self, model: str) -> str:
        """The query's name."""
        return model

    def run(self, opened: str, picture: np.ndarray, inputs: Pictures) -> list[np.ndarray]:
        """Nothing: what the server says is no output of the network."""
        self.server.ask_kserve(opened, picture.transpose(1, 2, 0), self.token)
        return []


WAYS = {"sessions": Sessions, "int8": Sessions, "openvino": OpenVino, "litserve": LitServe, "gemel": Gemel, "box": Box}


def tree_of(pid: int) -> list[int]:
    """A process and all that descend from it."""
    processes = [pid]
    for process in processes:
        for tasks in Path(f"/proc/{process}/task").glob("*/children"):
            processes += map(int, tasks.read_text().split())
    return processes


def memory_of(pids: list[int]) -> dict[str, float]:
    """PSS and anonymous memory of processes, MB."""
    total = {"Pss:": 0, "Pss_Anon:": 0}
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            words = line.split()
            if words[0] in total:
                total[words[0]] += int(words[1]) * 1024
    return {"pss_mb": round(total["Pss:"] / MB, 1), "anonymous_mb": round(total["Pss_Anon:"] / MB, 1)}


def clock(way: Any) -> float:
    """Seconds that the processes of this way have computed, without those of the client of a server."""
    if not hasattr(way, "server"):
        return time.process_time()
    tasks = (path for pid in tree_of(way.server.pid) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(path.read_text().split()[0]) for path in tasks) / 1e9


def play(way: Any, opened: Mapping[str, Any], inputs: Mapping[str, Pictures], fps: float, seconds: float) -> float:
    """The part of the frames answered before the next of the same camera comes, all cameras at this rate.

    One thread serves the newest waiting frame; a frame that waits when the next comes gives way to it, and counts as
    late. The clock is the way's own processor time.
    """
    models = sorted(opened)
    spread = ((n / fps + at / fps / len(models), model) for at, model in enumerate(models)
              for n in range(int(seconds * fps)))  # fmt: skip
    arrivals = deque(sorted(spread))
    total, in_time, now, number = len(arrivals), 0, 0.0, 0
    waiting: OrderedDict[str, float] = OrderedDict()
    while arrivals or waiting:
        if not waiting:
            now = max(now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now:
            arrived, model = arrivals.popleft()
            waiting.pop(model, None)
            waiting[model] = arrived
        model, arrived = waiting.popitem()
        pictures = inputs[model].pictures
        started = clock(way)
        way.run(opened[model], pictures[number % len(pictures)], inputs[model])
        now, number = now + clock(way) - started, number + 1
        in_time += now <= arrived + 1 / fps
    return round(in_time / total, 4)


def measure(way: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Memory after runs, frames in time, milliseconds; the outputs for all pictures go into the .npz of the request."""
    inputs = {model: read_pictures(path) for model, path in request["inputs"].items()}
    few = {model: Pictures(one.pictures[:1].copy(), one.mean, one.std, one.bgr) for model, one in inputs.items()}
    del inputs
    opened = {model: way.open(model) for model in request["files"]}
    for _ in range(WARM_RUNS):
        for model, session in opened.items():
            way.run(session, few[model].pictures[0], few[model])
    pids = tree_of(way.server.pid) if hasattr(way, "server") else [os.getpid()]
    opening_s, memory = clock(way), memory_of(pids)
    played = {str(fps): play(way, opened, few, fps, request["seconds"]) for fps in request["rates"]}
    outputs, milliseconds = {}, {}
    for model, session in opened.items():
        shown, times = read_pictures(request["inputs"][model]), []
        for number, picture in enumerate(shown.pictures):
            started = clock(way)
            results = way.run(session, picture, shown)
            times.append(1000 * (clock(way) - started))
            outputs |= {f"{model}/{number}/{place}": value for place, value in enumerate(results)}
        milliseconds[model] = round(float(np.median(times)), 2)
    np.savez(request["answers"], **outputs)
    mean = round(float(np.mean(list(milliseconds.values()))), 2)
    return {**memory, "processes": len(pids), "opening_s": round(opening_s, 2), "in_time": played, "ms": milliseconds,
            "ms_a_frame": mean}  # fmt: skip


def draw_requests(models: list[str], seed: int = 0) -> list[tuple[float, list[str]]]:
    """A quarter of an hour of requests: when each comes, in seconds, and the models that it chains."""
    draw = random.Random(seed)
    workflows = [draw.sample(models, draw.randint(MIN_CHAIN, MAX_CHAIN)) for _ in range(WORKFLOWS)]
    times = sorted(draw.uniform(0, REPLAY_S) for _ in range(REQUESTS_AN_HOUR * REPLAY_S // 3600))
    return [(at, draw.choice(workflows)) for at in times]


def fill(way: Any, inputs: Mapping[str, Pictures], limit_mb: float) -> OrderedDict[str, Any]:
    """Open and run models one after the other until the memory of the process passes the limit."""
    opened: OrderedDict[str, Any] = OrderedDict()
    for model in sorted(inputs):
        opened[model] = way.open(model)
        for _ in range(WARM_RUNS):
            way.run(opened[model], inputs[model].pictures[0], inputs[model])
        if memory_of([os.getpid()])["pss_mb"] > limit_mb and len(opened) > 1:
            del opened[model]
            break
    return opened


def replay(way: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Workflows within a limit of memory: a request opens the models that it lacks, and the longest unused one goes.

    Latency is from a request's arrival to the end of its chain, one request at a time, on the way's own clock.
    """
    read = {model: read_pictures(path) for model, path in request["inputs"].items()}
    inputs = {model: Pictures(one.pictures[:1].copy(), one.mean, one.std, one.bgr) for model, one in read.items()}
    del read
    opened = fill(way, inputs, request["limit_mb"])
    room, loads, latencies, now = len(opened), 0, [], 0.0
    for arrived, chain in draw_requests(sorted(inputs)):
        now = max(now, arrived)
        started = clock(way)
        for model in chain:
            if model not in opened:
                while len(opened) >= room:
                    opened.popitem(last=False)
                opened[model] = way.open(model)
                loads += 1
            opened.move_to_end(model)
            way.run(opened[model], inputs[model].pictures[0], inputs[model])
        now += clock(way) - started
        latencies.append(now - arrived)
    p50, p95 = (round(1000 * float(np.percentile(latencies, part)), 1) for part in (50, 95))
    return {"room": room, "reloads": loads * 3600 // REPLAY_S, "p50_ms": p50, "p95_ms": p95, **memory_of([os.getpid()])}


def main() -> None:
    """Do what the request asks and print it."""
    request = json.loads(Path(sys.argv[1]).read_text())
    way = WAYS[request["way"]](request)
    try:
        print(json.dumps(replay(way, request) if "limit_mb" in request else measure(way, request)))
    finally:
        if hasattr(way, "server"):
            way.server.close()


if __name__ == "__main__":
    main()
