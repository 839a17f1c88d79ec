"""The same files, several ways: `make compare`.

    python -m benchmarks.compare.compare [--workload detectors] [--way sessions] [--again] [--minutes 4]

Makes the files (`benchmarks.compare.files`), an environment for each rival and what each way serves, then measures each
way of each workload in a process of its own (`child.py`). A row that stands in `benchmarks/measured/compare` is not
measured again. Needs the footage, and package indexes for what rivals are installed from. `--quick` leaves out merges;
`--prepare` only makes what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

from benchmarks.compare.answers import agreements
from benchmarks.compare.files import DETECTORS, REPOSITORY, WORKLOADS, make_files
from benchmarks.data.files import say
from benchmarks.machine import machine

MEASURED = REPOSITORY / "benchmarks" / "measured" / "compare"
FOLDER = Path(__file__).resolve().parent
RATES = (2, 5, 10)
SECONDS = 3
REPLAY, LIMIT_PART = "replay", 8 / 12
"""A limit for eight of twelve plain sessions (seven fit): about one load for each request, as issue 2448 tells."""
PLAIN = "sessions"
FALLS_SHORT = 1
"""Exit code of a merge of which a query misses its target on test; the row shows its worst query."""


@dataclass(frozen=True)
class Way:
    """A way to serve files: how `child.py` calls it, what its environment needs, how its files or bundle are made."""

    child: str
    packages: tuple[str, ...]
    make: str = ""
    replayed: bool = True


ONNX_RUNTIME = ("onnxruntime", "numpy")
GEMEL = ("gemel",)
WAYS = {
    PLAIN: Way("sessions", ONNX_RUNTIME),
    "int8": Way("int8", ONNX_RUNTIME, "quantize"),
    "openvino": Way("openvino", ("openvino", "numpy")),
    "litserve": Way("litserve", (*ONNX_RUNTIME, "litserve", "python-multipart"), replayed=False),
    "packed": Way("gemel", GEMEL, "pack"),
    "packed-bits": Way("gemel", GEMEL, "pack-bits"),
    "box": Way("box", GEMEL, "pack", replayed=False),
    "merged": Way("gemel", GEMEL, "merge"),
    "merged-bits": Way("gemel", GEMEL, "merge-bits"),
}
MERGES = {
    "pack-bits": ("--method", "none"), "merge": ("--weights", "fp32"), "merge-bits": (),
}  # fmt: skip
"""Options of `gemel merge`, whose default is the fewest bits that hold."""


class Comparison:
    """One workload's ways; `out` has the files, `minutes` is the limit of a merge."""

    def __init__(self, workload: str, out: Path, minutes: float) -> None:
        self.workload, self.out, self.minutes = workload, out, minutes
        self.files = {path.stem: str(path.absolute()) for path in make_files(workload, out)}
        self.folder = (out / workload).absolute()
        self.inputs = {name: str(self.folder / "inputs" / "shown" / f"{name}.npz") for name in self.files}

    def environment(self, way: Way) -> tuple[Path, float]:
        """The Python of an environment with only this way's packages, and MB on disk of what it installed."""
        folder = self.out.absolute() / "envs" / "-".join(way.packages)
        stamp = folder / "size"
        if not stamp.is_file():
            say(f"installing {', '.join(way.packages)}")
            packages = [str(REPOSITORY) if name == "gemel" else package_version(name) for name in way.packages]
            run([sys.executable, "-m", "venv", "--clear", str(folder)])
            run([str(folder / "bin" / "python"), "-I", "-m", "pip", "install", "--quiet", *packages])
            stamp.write_text(str(installed_mb(folder)))
        return folder / "bin" / "python", float(stamp.read_text())

    def make(self, way: Way) -> tuple[dict[str, str], str, float]:
        """Files and bundle that a way serves, and the seconds of processor time that making them took."""
        if not way.make:
            return self.files, "", 0.0
        target = self.folder / way.make
        stamp = target / "seconds"
        if not stamp.is_file():
            say(f"{self.workload}: {way.make}")
            target.mkdir(exist_ok=True)
            started = children_s()
            self._quantize(target) if way.make == "quantize" else self._bundle(way.make, target)
            stamp.write_text(str(round(children_s() - started, 1)))
        files = {name: str(target / f"{name}.onnx") for name in self.files} if way.make == "quantize" else self.files
        return files, str(target / "box.safetensors"), float(stamp.read_text())

    def _quantize(self, target: Path) -> None:
        for name, path in self.files.items():
            inputs = self.folder / "inputs" / "train" / f"{name}.npz"
            run([sys.executable, str(FOLDER / "quantize.py"), path, str(inputs), str(target / f"{name}.onnx")])

    def _bundle(self, kind: str, target: Path) -> None:
        bundle = target / "box.safetensors"
        bundle.unlink(missing_ok=True)
        gemel = [sys.executable, "-m", "gemel"]
        if kind == "pack":
            run([*gemel, "pack", *self.files.values(), "-o", str(bundle)])
            return
        workload = target / "workload.yaml"
        self._write_workload(workload)
        options = ["--accept-unproven", "--max-minutes", str(self.minutes), *MERGES[kind]]
        run([*gemel, "merge", str(workload), "-o", str(bundle), *options], codes=(0, FALLS_SHORT))

    def _write_workload(self, path: Path) -> None:
        cameras, queries = {}, []
        for name, file in self.files.items():
            data = next(one for one in (self.folder / "data" / name, self.folder / "data" / f"{name}-vehicle")
                        if one.is_dir())  # fmt: skip
            cameras[name] = {"source": str(data)}
            queries.append({"id": name, "camera": name, "model": file, "data": str(data), "labels": "none"})
        path.write_text(yaml.safe_dump({"name": self.workload, "cameras": cameras, "queries": queries}))

    def measure(self, name: str) -> dict[str, Any]:
        """The row of a way."""
        way = WAYS[name]
        files, bundle, made_s = self.make(way)
        python, size_mb = self.environment(way)
        request = {"files": files, "bundle": bundle, "rates": RATES, "seconds": SECONDS,
                   "answers": str(self.answers(name))}  # fmt: skip
        row = self._ask(python, name, request)
        plain = self.answers(PLAIN)
        if way.child != "box":
            scores = agreements(self.files, plain, self.answers(name))
            row |= {"agreement": scores, "worst": min(scores.values())}
        served = Path(bundle).stat().st_size if bundle and way.make != "quantize" else sum(map(size_of, files.values()))
        return {**row, "made_s": made_s, "install_mb": size_mb, "files_mb": round(served / 1e6, 1)}

    def replay(self, name: str, limit_mb: float) -> dict[str, Any]:
        """The row of a way in an hour of workflows within a limit of memory."""
        files, bundle, _ = self.make(WAYS[name])
        python, _ = self.environment(WAYS[name])
        request = {"files": files, "bundle": bundle, "limit_mb": limit_mb}
        row = self._ask(python, name, request)
        whole = self._ask(python, name, {**request, "limit_mb": 1e9})
        return {**row, "p50_resident_ms": whole["p50_ms"], "slowdown": round(row["p50_ms"] / whole["p50_ms"], 2)}

    def answers(self, name: str) -> Path:
        """Where the outputs of a way lie."""
        return self.folder / f"answers-{name}.npz"

    def _ask(self, python: Path, name: str, request: Mapping[str, Any]) -> dict[str, Any]:
        path = self.folder / f"request-{name}.json"
        request = {**request, "way": WAYS[name].child, "inputs": self.inputs, "folder": str(self.folder)}
        path.write_text(json.dumps(request))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run([str(python), str(FOLDER / "child.py"), str(path)], env=environment, capture_output=True,
                              text=True, check=False)  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{self.workload}, {name}: {done.stderr.strip()[-1500:]}")
        return json.loads(done.stdout.strip().splitlines()[-1])


def package_version(package: str) -> str:
    """ONNX Runtime in the version of this environment, since it is what Gemel runs on; others as they are now."""
    if package != "onnxruntime":
        return package
    import onnxruntime

    return f"{package}=={onnxruntime.__version__}"


def run(command: Sequence[str], codes: Sequence[int] = (0,)) -> None:
    """Run a command from the root of the repository; its output is shown."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, check=False, cwd=REPOSITORY, env=environment, stdout=sys.stderr)
    if done.returncode not in codes:
        raise SystemExit(f"exit code {done.returncode}: {' '.join(command)}")


def children_s() -> float:
    """Processor time of all that this process has run and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def size_of(path: str) -> int:
    """Bytes of a file."""
    return Path(path).stat().st_size


def installed_mb(environment: Path) -> float:
    """MB that an environment's packages take, without pip and setuptools."""
    packages = next(environment.glob("lib/python3*/site-packages"))
    skipped = ("pip", "setuptools", "pkg_resources", "_distutils_hack")
    files = (path for entry in packages.iterdir() if not entry.name.startswith(skipped)
             for path in (entry.rglob("*") if entry.is_dir() else [entry]) if path.is_file())  # fmt: skip
    return round(sum(path.stat().st_size for path in files) / 1e6)


def read_record(name: str) -> dict[str, Any]:
    """The record of a workload as it stands; an empty one where there is none."""
    path = MEASURED / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"rows": {}}


def write_row(record: str, name: str, row: Mapping[str, Any]) -> None:
    """Add a row to a record."""
    MEASURED.mkdir(parents=True, exist_ok=True)
    whole = read_record(record)
    stamped = {**row, "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "machine": machine()}
    rows = {**whole["rows"], name: stamped}
    whole = {"command": "make compare", "workload": record, "rows": {key: rows[key] for key in WAYS if key in rows}}
    (MEASURED / f"{record}.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def compare(workload: str, names: Sequence[str], options: argparse.Namespace) -> None:
    """Measure the rows of a workload that are missing, and of detectors those of the replay."""
    comparison = Comparison(workload, options.out, options.minutes)
    names = [name for name in names if not (options.quick and WAYS[name].make in MERGES)]
    if options.prepare:
        for name in names:
            comparison.make(WAYS[name])
            comparison.environment(WAYS[name])
        return
    for name in _missing(workload, names, options.again):
        started = time.monotonic()
        write_row(workload, name, comparison.measure(name))
        say(f"{workload}, {name}: measured in {time.monotonic() - started:.0f} s")
    if workload == DETECTORS:
        limit_mb = replay_limit_mb(comparison, read_record(workload)["rows"][PLAIN])
        for name in _missing(REPLAY, [name for name in names if WAYS[name].replayed], options.again):
            write_row(REPLAY, name, comparison.replay(name, limit_mb))
            say(f"{REPLAY}, {name}: measured")


def _missing(record: str, names: Sequence[str], again: bool) -> list[str]:
    known = read_record(record)["rows"]
    return [name for name in names if again or name not in known]


def replay_limit_mb(comparison: Comparison, plain: Mapping[str, Any]) -> float:
    """What eight of twelve plain sessions take."""
    per_model = (plain["pss_mb"] - BASE_MB) / len(comparison.files)
    return round(BASE_MB + per_model * len(comparison.files) * LIMIT_PART, 1)


BASE_MB = 50.0
"""What a Python with NumPy and ONNX Runtime takes before any session, of `replay_limit_mb`."""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", choices=WORKLOADS)
    parser.add_argument("--way", action="append", choices=list(WAYS))
    parser.add_argument("--again", action="store_true", help="measure rows that are there, too")
    parser.add_argument("--quick", action="store_true", help="without merges, which take --minutes each")
    parser.add_argument("--prepare", action="store_true", help="make files, bundles and environments, measure nothing")
    parser.add_argument("--minutes", type=float, default=4.0, help="limit of a merge")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "out" / "compare")
    options = parser.parse_args()
    for workload in options.workload or WORKLOADS:
        compare(workload, options.way or list(WAYS), options)


if __name__ == "__main__":
    main()
