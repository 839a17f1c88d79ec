"""One arm of `gemel pack` in a process of its own: sessions opened, run, and their memory and time as JSON.

python -m gemel.packing_child plain '{"ID": {"path": "a.onnx", "shape": [1, 3, 320, 320]}}'
python -m gemel.packing_child packed '{"bundle": "box.safetensors"}'
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

RUNS, ROUNDS = 3, 5
TYPES = {"tensor(float16)": np.float16, "tensor(uint8)": np.uint8, "tensor(double)": np.float64}


def draw_inputs(session: Any, shape: Sequence[Any]) -> dict[str, np.ndarray]:
    """A drawn value for each input; sizes that a file leaves open are those of `shape`, else 1."""
    generator, values = np.random.default_rng(0), {}
    for given in session.get_inputs():
        open_sizes = shape if len(shape) == len(given.shape) else [1] * len(given.shape)
        pairs = zip(given.shape, open_sizes, strict=True)
        sizes = [next((size for size in pair if isinstance(size, int)), 1) for pair in pairs]
        values[given.name] = (255 * generator.random(sizes)).astype(TYPES.get(given.type, np.float32))
    return values


def open_plain(files: Mapping[str, Mapping[str, Any]]) -> list[Callable[[], Any]]:
    """A run of each file by a session as ONNX Runtime makes it, on one thread."""
    import onnxruntime

    runs = []
    for file in files.values():
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        session = onnxruntime.InferenceSession(file["path"], options, providers=["CPUExecutionProvider"])
        inputs = draw_inputs(session, file["shape"])
        runs.append(lambda session=session, inputs=inputs: session.run(None, inputs))
    return runs


def open_packed(bundle: str) -> list[Callable[[], Any]]:
    """A run of each query of a prepared bundle, as a box runs it."""
    from gemel.edge_runtime.engines.mapped_session import open_all
    from gemel.edge_runtime.engines.prepare import prepare_bundle
    from gemel.edge_runtime.engines.prepared import WEIGHTS
    from gemel.edge_runtime.memory.pages import MappedWeights
    from gemel.models.bundle import open_bundle

    prepared = prepare_bundle(open_bundle(bundle))
    runs = []
    for session in open_all(prepared, MappedWeights(prepared.folder / WEIGHTS)).values():
        frames = draw_inputs(session.session, session.query.input_shape)[session.query.input]
        runs.append(lambda session=session, frames=frames: session.run(frames))
    return runs


def main() -> None:
    """Open, run, measure, print."""
    kind, request = sys.argv[1], json.loads(sys.argv[2])
    runs = open_plain(request) if kind == "plain" else open_packed(request["bundle"])
    for _ in range(RUNS):
        for run in runs:
            run()
    words = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.endswith(" kB")]
    memory = {word[0].rstrip(":"): int(word[1]) * 1024 for word in words}
    times = []
    for _ in range(ROUNDS):
        started = time.process_time()
        for run in runs:
            run()
        times.append(1000 * (time.process_time() - started) / len(runs))
    print(json.dumps({"pss_bytes": memory["Pss"], "anonymous_bytes": memory["Anonymous"], "ms": round(min(times), 2)}))


if __name__ == "__main__":
    main()
