"""Times the engines against the original run bare, and weighs four queries that share against one, per engine.

Usage: python -m benchmarks.engines.engines speed|memory|overflow|families
       [--engines NAME ...] [--model NAME]
       [--rounds N] [--batch N] [--json FILE]

`speed`: the network alone on one prepared frame (or a batch), one thread, ResNet-50 at 224 pixels unless another model
is named: each engine with the arena's weights over the plain torch module (eager, weights of its own, the same frame,
channels last). Cases take turns, round by
round; ratios of medians, by the wall's clock and by the processor's, which says more where the machine does other
things too.
`memory`: processes that hold four queries sharing all but norms and heads, one of them, and none, each measured in a
process of its own after it has run: private bytes (USS), and those of them that no file stands behind.
`overflow`: one query in a half, a quarter, an eighth of its weights, the rest copied in every run, over the same
all resident: milliseconds of a run, and what a process of its own holds more once it has run.
`families`: every family of the zoo at the smallest frame it takes, engines torch and compiled against the plain module:
the largest difference of any output tensor in shares of its largest value, and what compiling took. Slow: a minute per
family.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.bundles.samples import CLASSES, INPUT_SIZE, bundle_query, write_measured_bundle
from benchmarks.engines.overflow import overflow
from benchmarks.engines.zoo import FAMILIES, families
from benchmarks.machine import held_bytes, machine
from edge_runtime.engines.registry import ENGINES, engine_class, make_engine
from edge_runtime.engines.setup import resident_arena
from edge_runtime.engines.torch_engine import TorchEngine
from models import zoo
from models.bundle import Bundle, open_bundle

QUERIES = ("first", "second", "third", "fourth")
MIB = 2**20


def main() -> None:
    """Measure one of the choices; print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "memory", "overflow", "families", "weigh"))
    parser.add_argument("--engines", nargs="*", help="default: all that can run here; of `families` torch and compiled")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), help="only these, for `families`")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=1, help="frames of a run of `speed`")
    parser.add_argument("--json", type=Path, help="also write the JSON here")
    parser.add_argument("--kept", type=Path, help="of `families`: JSON lines to add rows to; none is measured again")
    parser.add_argument("--bundle", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    default = (
        ["torch", "compiled"]
        if options.what == "families"
        else [name for name in ENGINES if engine_class(name).takes_tensors and not missing(name)]
    )
    engines = options.engines or default
    torch.set_num_threads(1)
    if options.what == "weigh":  # in a process of its own, started by `memory`
        print(json.dumps(weigh(options.bundle, engines[0], options.count)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "engines.gemel"
        if options.what == "speed":
            rows = speed(made_bundle(path, options.model), engines, options.rounds, options.batch)
        elif options.what == "memory":
            rows = memory(made_bundle(path, options.model).path, engines)
        elif options.what == "overflow":
            rows = overflow(made_bundle(path, options.model, names=QUERIES[:1]), options.rounds)
        else:
            rows = [row for name in engines for row in families(Path(folder), options.families, name, options.kept)]
    show(rows)
    text = json.dumps({"date": date.today().isoformat(), "machine": machine(), "model": options.model, "rows": rows})
    print(text)
    if options.json:
        options.json.write_text(text)


def missing(name: str) -> str | None:
    """Why an engine cannot run here."""
    return engine_class(name).missing("cpu")


def made_bundle(path: Path, model: str, names: Sequence[str] = QUERIES) -> Bundle:
    """Queries that share all but norms and heads."""
    torch.manual_seed(0)
    models = {name: zoo.build(model, CLASSES, {}, INPUT_SIZE).eval() for name in names}
    shared = {path for path, tensor in models["first"].state_dict().items() if tensor.ndim == 4}
    for name in names:
        own = models[name].state_dict()
        for key, tensor in own.items():
            if key in shared:
                tensor.copy_(models["first"].state_dict()[key])
            elif tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) * 0.2 + (0.9 if tensor.ndim == 1 else -0.1))
    return write_measured_bundle(path, models, [bundle_query(name, model) for name in names])


def speed(bundle: Bundle, names: Sequence[str], rounds: int, batch: int = 1) -> list[dict[str, Any]]:
    """Milliseconds of a forward pass and ratios to the original run bare."""
    frames = torch.rand(batch, 3, INPUT_SIZE, INPUT_SIZE).contiguous(memory_format=torch.channels_last)
    bare = bundle.build("first", copy=True).requires_grad_(False)
    last = bundle.build("first", copy=True).requires_grad_(False)
    last = last.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    cases: dict[str, Callable[[], object]] = {
        "bare": lambda: bare(frames),
        "bare, weights channels last": lambda: last(frames),
    }
    arenas, difference = [], {}
    for name in names:
        engine = make_engine(name, bundle, "first")
        engine.prepare()
        arenas.append(resident_arena(bundle, {"first": engine}))
        with torch.inference_mode():
            difference[name] = float((engine.forward(frames) - bare(frames)).abs().max())
        cases[name] = lambda engine=engine: engine.forward(frames)
    bf16 = TorchEngine(bundle, "first", precision="bf16")
    arenas.append(resident_arena(bundle, {"first": bf16}))
    cases["torch, precision bf16"] = lambda: bf16.forward(frames)
    wall, cpu = run_in_turns(cases, rounds)
    rows = []
    for case, times in wall.items():
        rows.append(
            {
                "engine": case,
                "ms": round(median(times), 1),
                "cpu_ms": round(median(cpu[case]), 1),
                "ratio": round(median(times) / median(wall["bare"]), 3),
                "cpu_ratio": round(median(cpu[case]) / median(cpu["bare"]), 3),
                "difference": difference.get(case),
            }
        )
    return rows


def run_in_turns(cases: Mapping[Any, Callable[[], object]], rounds: int) -> tuple[dict[Any, list[float]], ...]:
    """Milliseconds of each case by the wall's and the processor's clock, cases in turns, two rounds not counted."""
    wall: dict[Any, list[float]] = {case: [] for case in cases}
    cpu: dict[Any, list[float]] = {case: [] for case in cases}
    with torch.inference_mode():
        for index in range(rounds + 2):
            for case, run in cases.items():
                start, busy = time.perf_counter(), time.process_time()
                run()
                if index >= 2:
                    cpu[case].append(1000 * (time.process_time() - busy))
                    wall[case].append(1000 * (time.perf_counter() - start))
    return wall, cpu


def memory(bundle: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """MiB of processes that hold four queries and one, per engine, and of one that holds none."""
    rows = []
    for name in names:
        opened = open_bundle(bundle)
        make_engine(name, opened, "first").prepare()  # what is made once for an architecture is not weighed
        found = {count: _weigh_process(bundle, name, count) for count in (0, 1, 4)}
        rows.append(
            {
                "engine": name,
                **{f"uss_{count}": round(found[count]["uss"] / MIB) for count in found},
                **{f"anonymous_{count}": round(found[count]["anonymous"] / MIB) for count in found},
                "ratio": round(found[4]["uss"] / found[1]["uss"], 3),
                "anonymous_ratio": round(found[4]["anonymous"] / found[1]["anonymous"], 3),
            }
        )
    return rows


def _weigh_process(bundle: Path, name: str, count: int) -> dict[str, int]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.engines.engines",
        "weigh",
        "--engines",
        name,
        "--bundle",
        str(bundle),
        "--count",
        str(count),
    ]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def weigh(bundle: Path, name: str, count: int) -> dict[str, int]:
    """Private bytes of this process once `count` queries are resident and have run; all of them, and anonymous ones."""
    opened = open_bundle(bundle)
    engines = {query: make_engine(name, opened, query) for query in QUERIES[: max(1, count)]}
    arena = None
    if count:
        arena = resident_arena(opened, engines)
        frames = torch.rand(1, 3, INPUT_SIZE, INPUT_SIZE).contiguous(memory_format=torch.channels_last)
        with torch.inference_mode():
            for _ in range(3):
                for engine in engines.values():
                    engine.forward(frames)
    gc.collect()
    found = held_bytes()
    assert arena is not None or not count
    return found


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """One table."""
    print("  ".join(f"{column:>16}" for column in rows[0]))
    for row in rows:
        print(
            "  ".join(
                f"{value:>16}" if not isinstance(value, float) else f"{value:>16.4g}"
                for value in ("" if value is None else value for value in row.values())
            )
        )


if __name__ == "__main__":
    main()
