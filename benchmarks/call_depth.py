"""How deep the code is: the frames from `gemel merge` to `optimizer.step()`, and the files behind a box config.

Runs the real command on a tiny workload with untrained models and records the stack at the first optimiser step; then
reads a box config and prepares the box, and counts the project's files whose functions receive the config or one of
its parts as an argument.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import yaml

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("edge_runtime", "gemel", "merger", "models")
# From the command over the ladder (climb, run) and the queries of a step (train_private, for_each_query) to the loop.
MAX_MERGE_FRAMES, MAX_MERGE_FILES, MAX_CONFIG_FILES = 11, 8, 20


def project_file(frame: FrameType) -> str | None:
    """The frame's file relative to the repository, None outside the product."""
    path = Path(frame.f_code.co_filename).resolve()
    if not path.is_relative_to(ROOT):
        return None
    relative = path.relative_to(ROOT)
    return str(relative) if relative.parts[0] in PACKAGES else None


def project_stack() -> list[tuple[str, str]]:
    """(file, function) of the product's frames on the stack, outermost first."""
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        if (file := project_file(frame)) is not None:
            frames.append((file, frame.f_code.co_name))
        frame = frame.f_back
    return frames[::-1]


class Stop(BaseException):
    """Ends a command once the stack is recorded."""


def merge_stack(workload: Path, folder: Path) -> list[tuple[str, str]]:
    """The frames from the command `gemel merge` to the first `optimizer.step()`."""
    from gemel.cli import main
    from gemel.merger.context import MergeContext

    found: list[tuple[str, str]] = []

    def record(self: torch.optim.AdamW, closure: Any = None) -> None:
        found.extend(project_stack())
        raise Stop

    step, torch.optim.AdamW.step = torch.optim.AdamW.step, record
    ratio = MergeContext.ratio
    setattr(MergeContext, "ratio", lambda *_: 0.5)  # noqa: B010  (nothing holds untrained)
    try:
        with patch(
            "gemel.models.measures.evaluation.is_competent", lambda *_: True
        ):  # an untrained original is no evidence
            main(["merge", str(workload), "-o", str(folder / "b.gemel"), "--epochs", "1", "--accept-unproven"])
    except Stop:
        pass
    finally:
        torch.optim.AdamW.step, MergeContext.ratio = step, ratio
    start = max(index for index, (file, _) in enumerate(found) if file == "gemel/commands.py")
    return found[start:]


@contextmanager
def trace_calls(receives: Callable[[Any], bool]) -> Iterator[tuple[set[str], set[str]]]:
    """The product's files of which a function is called within, and those where one receives such an argument."""
    called: set[str] = set()
    receiving: set[str] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (file := project_file(frame)) is None or frame.f_code.co_name == "<module>":
            return
        called.add(file)
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
        if file not in receiving and any(receives(frame.f_locals.get(name)) for name in names):
            receiving.add(file)

    sys.setprofile(profile)
    try:
        yield called, receiving
    finally:
        sys.setprofile(None)


def config_files(workload: Path, folder: Path) -> tuple[set[str], set[str]]:
    """The product's files that run until a box can serve, and those that the config or its path goes through."""
    from gemel.edge_runtime.life.box import CostedBox, LoadedBox, ReadyBox
    from gemel.edge_runtime.life.config import BoxConfig, CameraConfig, SpoolConfig
    from gemel.edge_runtime.life.daemon import prepare
    from gemel.merger import merge
    from gemel.models.workload import load_workload

    bundle, config = folder / "none.gemel", folder / "box.yaml"
    merge(load_workload(workload), bundle, "none")
    keys = f"cameras: {{c: {{source: {folder / 'c.mp4'}, fps: 5}}}}"
    config.write_text(f"bundle: {bundle}\nbudget: 1GB\nengine: torch\n{keys}\n")
    kinds = (BoxConfig, CameraConfig, SpoolConfig, LoadedBox, CostedBox, ReadyBox)
    with trace_calls(lambda value: isinstance(value, kinds) or value == config) as files:
        prepare(config)
    return files


def write_tiny_workload(folder: Path) -> Path:
    """Two untrained classifiers that share an architecture, with frames."""
    from benchmarks.gpu.training import square_workload
    from gemel.models.files.weights import save_weights
    from gemel.models.zoo import build_query

    workload = square_workload(folder, "cifar_resnet20", 32, 16)
    for seed, query in enumerate(workload.queries):
        torch.manual_seed(seed)
        save_weights(folder / f"{query.id}.safetensors", build_query(query).state_dict())
    document = yaml.safe_load(workload.path.read_text(encoding="utf-8"))
    for query in document["queries"]:
        query["keep_architecture"] = True  # the path is that of layers
    workload.path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return workload.path


def main() -> int:
    """Print both paths; exit code 1 with --check when one is longer than its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit code 1 beyond the limits")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workload = write_tiny_workload(folder)
        stack = merge_stack(workload, folder)
        called, files = config_files(workload, folder)
    merge_files = len({file for file, _ in stack})
    print(f"gemel merge to optimizer.step(): {len(stack)} frames in {merge_files} files")
    print(*(f"  {file}: {function}" for file, function in stack), sep="\n")
    print(f"a box config goes through {len(files)} files, of {len(called)} that run before the box can serve")
    print(*(f"  {file}" for file in sorted(files)), sep="\n")
    within = len(stack) <= MAX_MERGE_FRAMES and merge_files <= MAX_MERGE_FILES and len(files) <= MAX_CONFIG_FILES
    return 1 if check and not within else 0


if __name__ == "__main__":
    sys.exit(main())
