"""`python -m gemel.video_samples OUT [--seed N]` writes the sample workload into OUT."""

from __future__ import annotations

import argparse
from pathlib import Path

from gemel.video_samples.sample import write_sample


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gemel.video_samples", description="Renders the sample workload."
    )
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument(
        "--seed", type=int, default=0, help="decides all traffic, weather and noise"
    )
    arguments = parser.parse_args()
    print(write_sample(arguments.out, arguments.seed))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
