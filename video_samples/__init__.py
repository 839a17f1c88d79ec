"""Renders camera clips with ground truth, and the sample workload made from them."""

from __future__ import annotations

from pathlib import Path


def write_sample(out_dir: Path | str, seed: int = 0) -> Path:
    """Renders the sample workload into `out_dir` and returns its workload file (see `video_samples.sample`)."""
    from gemel.video_samples.sample import (
        write_sample as write,  # numpy and OpenCV load only when something is rendered
    )

    return write(out_dir, seed)
