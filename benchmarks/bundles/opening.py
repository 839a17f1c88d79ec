"""Writes and opens a bundle of 500 MB, as a ratio to writing and reading a plain file in the same run.

Usage: python -m benchmarks.bundles.opening [--dir DIR] [--runs N]

Prints one JSON object: best seconds and ratios (bundle / plain), for reading from the disk and from the
page cache, and how much private memory opening and building take. DIR must be on a disk; its files are
removed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.bundles.samples import bundle_query
from gemel.models import zoo
from gemel.models.bundle import Bundle, BundleQuery, Made, open_bundle, verify_bundle, write_bundle

MODEL, CLASSES, INPUT_SIZE = "vgg16", tuple(f"class {index}" for index in range(300)), 224
CHUNK_BYTES = 8 << 20


def main() -> None:
    """Run all measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("."), help="where the files are written for a while")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bundle-benchmark-", dir=options.dir))
    try:
        print(json.dumps(measure(folder, options.runs), indent=2))
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, runs: int) -> dict[str, object]:
    """Every figure; each pair of bundle and plain file is measured in turn, run by run."""
    model, query = two_models()
    bundle, plain = folder / "bundle", folder / "plain"
    write(bundle, model, query)
    size = bundle.stat().st_size
    content = bundle.read_bytes()
    writes = pairs(runs, lambda: write(bundle, model, query), lambda: write_plain(plain, content))
    arena = torch.ones(size, dtype=torch.uint8)  # ones, so that its pages are there
    reads = {
        cache: pairs(
            runs,
            lambda: load(open_bundle(bundle), arena),
            lambda: read_plain(plain, arena),
            before=(lambda: forget(bundle, plain)) if cache == "disk" else None,
        )
        for cache in ("disk", "page cache")
    }
    open_bundle(bundle).build("first")  # what torch itself loads on first use is not the bundle's
    before = private_bytes()
    started = time.perf_counter()
    opened = open_bundle(bundle)
    open_s = time.perf_counter() - started
    models = [opened.build(query.id) for query in opened.queries]
    open_and_build_s = time.perf_counter() - started
    taken_bytes = private_bytes() - before
    del models
    return {
        "bytes": size,
        "write": writes,
        "read from the disk": reads["disk"],
        "read from the page cache": reads["page cache"],
        "verify_s": seconds(lambda: verify_bundle(bundle)),
        "open_s": open_s,
        "open_and_build_s": open_and_build_s,
        "private_bytes_taken_by_opening_and_building": taken_bytes,
    }


def two_models() -> tuple[dict[str, nn.Module], list[BundleQuery]]:
    """Two queries of one architecture that share every weight but the head's."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    first, second = (zoo.build(MODEL, CLASSES, {}, INPUT_SIZE) for _ in range(2))
    own = dict(second.named_parameters())
    shared = {name: tensor for name, tensor in first.named_parameters() if tensor.shape[0] != len(CLASSES)}
    second.load_state_dict({**own, **shared}, assign=True)
    records = [bundle_query(query, MODEL, CLASSES, INPUT_SIZE) for query in ("first", "second")]
    return {"first": first, "second": second}, records


def write(path: Path, models: dict[str, nn.Module], queries: list[BundleQuery]) -> None:
    """Our writer: hash, write, fsync, rename."""
    write_bundle(path, models, queries, Made("benchmark", "ceiling", 0), overwrite=True)


def write_plain(path: Path, content: bytes) -> None:
    """The same bytes to a new file, with fsync and rename."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        for start in range(0, len(content), CHUNK_BYTES):
            file.write(memoryview(content)[start : start + CHUNK_BYTES])
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def load(bundle: Bundle, arena: torch.Tensor) -> None:
    """Open, and copy every tensor in load order into device memory, which is the arena here."""
    at = 0
    for name, entry in bundle.header.entries.items():
        if not entry.is_pad:
            arena[at : at + entry.nbytes].copy_(bundle.tensor(name).view(-1).view(torch.uint8))
            at += entry.nbytes


def read_plain(path: Path, arena: torch.Tensor) -> None:
    """The same bytes from a plain file into the same memory."""
    view = memoryview(arena.numpy())  # type: ignore[arg-type]
    with open(path, "rb", buffering=0) as file:
        at = 0
        while read := file.readinto(view[at : at + CHUNK_BYTES]):
            at += read


def pairs(
    runs: int, ours: Callable[[], object], plain: Callable[[], object], before: Callable[[], object] | None = None
) -> dict[str, float]:
    """Best seconds of both, taken in turn, and their ratio: what else the machine does can only add."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(runs):
        for action, times in zip((ours, plain), taken, strict=True):
            if before:
                before()
            times.append(seconds(action))
    bundle_s, plain_s = min(taken[0]), min(taken[1])
    return {"bundle_s": bundle_s, "plain_s": plain_s, "ratio": bundle_s / plain_s}


def seconds(action: Callable[[], object]) -> float:
    """How long one call takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def forget(*paths: Path) -> None:
    """Drop the files from the page cache, so that the next read comes from the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def private_bytes() -> int:
    """Anonymous memory of this process: what is its own, not a view of a file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
