"""Memory of a box beside that of the script that it replaces.

    OMP_NUM_THREADS=1 python -m benchmarks.serving.footprint box.yaml [--seconds 40] [--json FILE]

Two arms, one after the other, each a process of its own: `box` is `gemel run` of the config; `script` decodes the same
cameras with PyAV and runs each query's network, with all weights of its own, in a plain session of ONNX Runtime, at 5
frames a second. Prepare the bundle first (`gemel prepare`), and let cameras loop. Memory is read from the system after
`--seconds`: PSS, and anonymous memory, which decides; the processor time of each counts from its start.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.engines.mapped import write_originals
from benchmarks.machine import machine
from gemel.edge_runtime.life.config import load_config
from gemel.models.bundle import open_bundle

SCRIPT = """
import sys, time
import av, numpy as np, onnxruntime
seconds, *pairs = sys.argv[1:]
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
streams, runs = {}, []
for pair in pairs:
    path, source = pair.split("=")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    taken = session.get_inputs()[0]
    runs.append((session, taken.name, taken.shape[2:], source))

def frames(source):
    while True:
        with av.open(source) as container:
            for frame in container.decode(video=0):
                yield frame

end = time.monotonic() + float(seconds) + 30
while time.monotonic() < end:
    begun = time.monotonic()
    pictures = {}
    for session, name, (height, width), source in runs:
        if source not in streams:
            streams[source] = frames(source)
        if source not in pictures:
            pictures[source] = next(streams[source])
        picture = pictures[source].to_ndarray(format="rgb24", width=width, height=height)
        session.run(None, {name: np.ascontiguousarray(picture.transpose(2, 0, 1)[None], np.float32) / 255})
    time.sleep(max(0.0, 0.2 - (time.monotonic() - begun)))
"""


def measure(command: list[str], seconds: float, log: Path) -> dict[str, Any]:
    """Memory of a process after so many seconds, in MB, and its processor time; then it is ended."""
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    time.sleep(seconds)
    if process.poll() is not None:
        raise SystemExit(f"{command[0]} ended:\n{log.read_text()[-2000:]}")
    root = Path(f"/proc/{process.pid}")
    words = [line.split() for line in (root / "smaps_rollup").read_text().splitlines() if line.endswith(" kB")]
    memory = {word[0].rstrip(":"): int(word[1]) / 1000 for word in words}
    fields = (root / "stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
    return {
        "pss_mb": round(memory["Pss"], 1), "anonymous_mb": round(memory["Anonymous"], 1),
        "processor_s": round((int(fields[11]) + int(fields[12])) / ticks, 2),
    }  # fmt: skip


def main() -> None:
    """Measure both arms and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = load_config(options.config)
    bundle = open_bundle(config.bundle)
    with tempfile.TemporaryDirectory(prefix="gemel-") as name:
        folder = Path(name)
        write_originals(config.bundle, folder)
        pairs = [f"{folder / query.id}.onnx={config.cameras[query.camera].source}" for query in bundle.queries]
        arms = {
            "script": [sys.executable, "-c", SCRIPT, str(options.seconds), *pairs],
            "box": [sys.executable, "-m", "gemel", "run", str(options.config)],
        }
        rows = {arm: measure(command, options.seconds, folder / f"{arm}.log") for arm, command in arms.items()}
    ratios = {key: round(rows["box"][key] / rows["script"][key], 3) for key in ("pss_mb", "anonymous_mb")}
    report = {"command": f"python -m benchmarks.serving.footprint {options.config.name}", "machine": machine(),
              "arms": rows, "box_over_script": ratios}  # fmt: skip
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
