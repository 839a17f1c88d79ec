"""Memory and time of the engine `onnx` beside plain sessions of ONNX Runtime over the same networks.

    python -m benchmarks.engines.mapped resnet50:224:4 mobilenet_v2:224:4 ssdlite320_mobilenet_v2:320:12
    python -m benchmarks.engines.mapped --apart ssdlite320_mobilenet_v2:320:12
    python -m benchmarks.engines.mapped --bundle box.gemel

Each NAME:SIDE:COUNT is a bundle of networks of one architecture with norms and heads of their own; with `--apart`
every weight is each network's own. Each arm is a process of its own without torch: `plain` opens a session of ONNX
Runtime for each query, `onnx` is the product's recipe. Memory is read after three runs of each session, time is
processor time of the fastest of five rounds, in turns: arms run twice, and the better time counts. Outputs of the arms
must agree to 1e-4 of the largest, and those after eviction be equal to the bit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

RUNS, ROUNDS, TURNS = 3, 5, 2
TOLERANCE = 1e-4
ARMS = ("plain", "onnx")


def make_networks(name: str, side: int, count: int, is_apart: bool, classes: tuple[str, ...]) -> Sequence[Any]:
    """`count` networks of one architecture with norms and heads of their own; `is_apart`: with weights of their own."""
    import copy

    import torch

    from gemel.models import zoo

    base = zoo.build(name, classes, {}, side, task_of(name)).eval()
    models = []
    for _ in range(count):
        model = copy.deepcopy(base)
        with torch.no_grad():
            for key, tensor in model.state_dict().items():
                if key.endswith("running_var"):
                    tensor.uniform_(0.5, 1.5)
                elif tensor.is_floating_point() and tensor.ndim == 1:
                    tensor.add_(torch.empty_like(tensor).uniform_(-0.1, 0.1))
                elif tensor.is_floating_point() and (is_apart or tensor.shape[0] == len(classes)):
                    tensor.mul_(torch.empty_like(tensor).uniform_(0.9, 1.1))
        models.append(model)
    return models


def task_of(name: str) -> str:
    """The task of a network of the zoo."""
    from gemel.models import zoo

    return "detection" if name in zoo.names("detection") else "classification"


def make_bundle(path: Path, families: Sequence[tuple[str, int, int]], is_apart: bool, **keys: Any) -> None:
    """Write a bundle with documents of networks; `families` are an architecture, a side and a number of queries each.

    Queries are q0, q1, ...; `keys` are of every query's record, in place of a camera `one`, 5 frames a second and 1 s.
    """
    import torch

    from gemel.models.bundle import BundleQuery, Made, write_bundle
    from gemel.models.export.export_document import export_documents
    from gemel.models.preprocess import Preprocess

    torch.manual_seed(0)
    classes = tuple("abcdefghij")
    record = {"camera": "one", "fps": 5.0, "sla_ms": 1000.0, "accuracy_target": 0.95, **keys}
    models, queries = {}, []
    for name, side, count in families:
        for model in make_networks(name, side, count, is_apart, classes):
            query = BundleQuery(
                id=f"q{len(queries)}", task=task_of(name), classes=classes, model=name, model_args={}, input_size=side,
                preprocess=Preprocess((side, side)), **record,
            )  # fmt: skip
            models[query.id] = model
            queries.append(query)
    write_bundle(path, models, queries, Made("onnx", "none", 0), documents=export_documents(models, queries))


def write_originals(bundle_path: Path, folder: Path) -> None:
    """Write each query as an ONNX file with its weights inside, as an exporter would."""
    import onnx

    from gemel.models.bundle import open_bundle
    from gemel.models.bundle.query_documents import key_of_weight, refers_to_weights
    from gemel.models.bundle.stored_arrays import BundleArrays

    bundle = open_bundle(bundle_path)
    tensors = BundleArrays(bundle)
    for query in bundle.queries:
        model = tensors.document_of(query)
        for tensor in model.graph.initializer:
            if refers_to_weights(tensor):
                array = tensors.array_of(query.tensors[key_of_weight(query, tensor.name)])
                tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
        (folder / f"{query.id}.onnx").write_bytes(model.SerializeToString())


def draw_frames(shape: Any) -> np.ndarray:
    """One drawn frame of an input's shape."""
    sizes = [size if isinstance(size, int) else 1 for size in shape]
    return np.random.default_rng(0).standard_normal(sizes, np.float32)


def open_plain(folder: Path) -> dict[str, Callable[[], list[np.ndarray]]]:
    """A run of each file by a session as ONNX Runtime makes it."""
    import onnxruntime

    runs = {}
    for path in sorted(folder.glob("*.onnx")):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        feed = {session.get_inputs()[0].name: draw_frames(session.get_inputs()[0].shape)}
        runs[path.stem] = lambda session=session, feed=feed: session.run(None, feed)
    return runs


@dataclass(frozen=True)
class OpenedArm:
    """What an arm runs: a run by query, what gives its memory back, and what else it says of itself."""

    runs: Mapping[str, Callable[[], list[np.ndarray]]]
    evict: Callable[[], object] | None
    facts: Mapping[str, Any]


def open_mapped(bundle_path: Path) -> OpenedArm:
    """A run of each query by the product's sessions."""
    from gemel.edge_runtime.engines.mapped_session import MappedSession, open_all
    from gemel.edge_runtime.engines.prepare import prepare_bundle
    from gemel.edge_runtime.engines.prepared import WEIGHTS, page_segments
    from gemel.edge_runtime.memory.pages import MappedWeights
    from gemel.models.bundle import open_bundle

    started = time.perf_counter()
    prepared = prepare_bundle(open_bundle(bundle_path))
    found_ms = round(1000 * (time.perf_counter() - started), 1)
    weights = MappedWeights(prepared.folder / WEIGHTS)
    extents, _ = page_segments(prepared.index)
    sessions = open_all(prepared, weights)

    def run_of(session: MappedSession) -> Callable[[], list[np.ndarray]]:
        frames = draw_frames(session.query.input_shape)
        return lambda: session.run(frames)

    def evict() -> None:
        weights.give_back(extents.values())

    facts = {
        "found_ms": found_ms, "file_bytes": prepared.index.weights_bytes, "peak_bytes": prepared.index.peak_bytes,
        "prepared_s": round(prepared.index.seconds, 1),
    }  # fmt: skip
    return OpenedArm({query: run_of(session) for query, session in sessions.items()}, evict, facts)


def measure_arm(arm: str, bundle_path: Path, folder: Path) -> dict[str, Any]:
    """Memory and time of one arm, in this process; its outputs go into the folder."""
    from gemel.edge_runtime.memory.usage import memory_rollup

    started = time.process_time()
    opened = OpenedArm(open_plain(folder), None, {}) if arm == "plain" else open_mapped(bundle_path)
    facts = {**opened.facts, "open_s": round(time.process_time() - started, 3)}
    runs = opened.runs
    outputs = {query: run() for query, run in runs.items()}
    for _ in range(RUNS - 1):
        for run in runs.values():
            run()
    memory = memory_rollup()
    times = []
    for _ in range(ROUNDS):
        started = time.process_time()
        for run in runs.values():
            run()
        times.append(1000 * (time.process_time() - started) / len(runs))
    if opened.evict is not None:
        opened.evict()
        facts["evicted_pss_bytes"] = memory_rollup()["Pss"]
        again = {query: run() for query, run in runs.items()}
        same = [np.array_equal(a, b) for query in runs for a, b in zip(outputs[query], again[query], strict=True)]
        facts["equal_after_eviction"] = all(same)
    values: dict[str, Any] = {}
    for query, answers in outputs.items():
        values.update({f"{query}.{place}": answer for place, answer in enumerate(answers)})
    np.savez(folder / f"{arm}.npz", **values)
    assert "torch" not in sys.modules
    return {"arm": arm, "anonymous_bytes": memory["Anonymous"], "pss_bytes": memory["Pss"], "ms": min(times), **facts}


def difference(folder: Path) -> float:
    """The largest difference of the arms' outputs, in parts of the largest value of each."""
    plain, mapped = (np.load(folder / f"{arm}.npz") for arm in ARMS)
    worst = 0.0
    for name in plain.files:
        scale = max(1.0, float(np.abs(plain[name]).max(initial=0)))
        worst = max(worst, float(np.abs(plain[name] - mapped[name]).max(initial=0)) / scale)
    return worst


def run_child(*arguments: str) -> str:
    """The last line that this script printed in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.engines.mapped", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def compare(label: str, bundle: Path, folder: Path) -> dict[str, Any]:
    """Both arms over a bundle, each twice in turns."""
    run_child("--originals", str(bundle), str(folder))
    run_child("--arm", "onnx", str(bundle), str(folder))  # prepares
    best: dict[str, dict[str, Any]] = {}
    for _ in range(TURNS):
        for arm in ARMS:
            row: dict[str, Any] = json.loads(run_child("--arm", arm, str(bundle), str(folder)))
            row["ms"] = round(min(row["ms"], best.get(arm, row)["ms"]), 2)
            best[arm] = row
    worst = difference(folder)
    plain, mapped = best["plain"], best["onnx"]
    result = {
        "case": label,
        **best,
        "difference": worst,
        "anonymous_ratio": round(mapped["anonymous_bytes"] / plain["anonymous_bytes"], 3),
        "pss_ratio": round(mapped["pss_bytes"] / plain["pss_bytes"], 3),
        "ms_ratio": round(mapped["ms"] / plain["ms"], 3),
    }
    print(json.dumps(result), flush=True)
    assert worst <= TOLERANCE and mapped["equal_after_eviction"], result
    return result


def main() -> None:
    """Parse the command line; see the top of this file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", metavar="NAME:SIDE:COUNT")
    parser.add_argument("--apart", action="store_true", help="every weight is each network's own")
    parser.add_argument("--bundle", type=Path, help="a bundle with documents instead")
    parser.add_argument("--arm", choices=ARMS)
    parser.add_argument("--originals", nargs=2, type=Path)
    parser.add_argument("--make", nargs=5)
    given = parser.parse_args()
    if given.arm:
        bundle, folder = map(Path, given.cases)
        print(json.dumps(measure_arm(given.arm, bundle, folder)))
    elif given.originals:
        write_originals(*given.originals)
    elif given.make:
        path, name, side, count, is_apart = given.make
        make_bundle(Path(path), [(name, int(side), int(count))], is_apart == "True")
    else:
        cases = [(str(given.bundle), given.bundle)] if given.bundle else [(case, None) for case in given.cases]
        for label, bundle in cases:
            with tempfile.TemporaryDirectory(prefix="gemel-mapped-") as folder:
                path = bundle or Path(folder) / "made.gemel"
                if bundle is None:
                    run_child("--make", str(path), *label.split(":"), str(given.apart))
                compare(label + (" apart" if given.apart else ""), path, Path(folder))


if __name__ == "__main__":
    main()
