"""What a pass over frames and a training step cost the CPU: with freed memory given back, kept, and a fused AdamW.

Usage: python -m benchmarks.engines.step [--rounds 3]

Each variant runs in a process of its own, in turn; the table gives the median processor time over that of `plain`
(glibc as it comes, AdamW tensor by tensor), and peak resident memory. `kept` is
models.process.keep_freed_memory; `fused` is that and the optimiser in one pass, as merger.training.loop has
both.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from gemel.models.process import keep_freed_memory
from gemel.models.zoo import build

VARIANTS = ("plain", "kept", "fused")
CASES = {
    "ssdlite320_mobilenet_v2, 32 frames of 320, inference": ("ssdlite320_mobilenet_v2", 320, 32, False),
    "ssd320_squeezenet1_0, 32 frames of 320, inference": ("ssd320_squeezenet1_0", 320, 32, False),
    "mobilenet_v2, 16 frames of 320, training step": ("mobilenet_v2", 320, 16, True),
    "resnet34, 16 frames of 64, training step": ("resnet34", 64, 16, True),
    "vgg11_bn, 16 frames of 64, training step": ("vgg11_bn", 64, 16, True),
}
RUNS = 3


def measure_step(variant: str) -> dict[str, list[float]]:
    """Case -> processor seconds of the quickest of a few runs, and the process's peak memory in MB so far."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if variant != "plain" and not keep_freed_memory():
        sys.exit("this C library cannot keep what is freed")
    found = {}
    for case, (name, size, count, trains) in CASES.items():
        run = _step(name, size, count, variant == "fused") if trains else _pass(name, size, count)
        run()
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        found[case] = [min(_time_step(run) for _ in range(RUNS)), peak_mb]
    return found


def _time_step(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def _frames(size: int, count: int) -> torch.Tensor:
    return torch.rand(count, 3, size, size).contiguous(memory_format=torch.channels_last)


def _pass(name: str, size: int, count: int) -> Callable[[], object]:
    model = build(name, ("vehicle",), input_size=size).eval().to(memory_format=torch.channels_last)  # type: ignore
    frames = _frames(size, count)
    return torch.no_grad()(lambda: model(frames))


def _step(name: str, size: int, count: int, fused: bool) -> Callable[[], object]:
    model = build(name, ("car", "none"), input_size=size).train().to(memory_format=torch.channels_last)  # type: ignore
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    frames, labels = _frames(size, count), torch.arange(count) % 2

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(frames), labels).backward()
        optimiser.step()

    return step


def main() -> None:
    """Print the table (Markdown)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variant", choices=VARIANTS, help="what one process measures")
    given = parser.parse_args()
    if given.variant:
        print(json.dumps(measure_step(given.variant)))
        return
    rounds: dict[str, list[dict[str, list[float]]]] = {variant: [] for variant in VARIANTS}
    for _ in range(given.rounds):
        for variant, found in rounds.items():
            command = [sys.executable, "-m", "benchmarks.engines.step", "--variant", variant]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found.append(json.loads(done.stdout))
    print("| case | plain: s | " + " | ".join(f"{variant} / plain" for variant in VARIANTS[1:]) + " |")
    print("| --- | ---: |" + " ---: |" * (len(VARIANTS) - 1))
    for case in CASES:
        seconds = {variant: statistics.median(one[case][0] for one in found) for variant, found in rounds.items()}
        ratios = " | ".join(f"{seconds[variant] / seconds['plain']:.2f}" for variant in VARIANTS[1:])
        print(f"| {case} | {seconds['plain']:.2f} | {ratios} |")
    peaks = {variant: max(value[1] for one in found for value in one.values()) for variant, found in rounds.items()}
    print("\npeak resident memory: " + ", ".join(f"{variant} {peak:,.0f} MB" for variant, peak in peaks.items()))


if __name__ == "__main__":
    main()
