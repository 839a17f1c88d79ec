"""The process that reads a model which arrived, and ends: `python -m ... MODEL NAME CAMERA BUNDLE`. Needs torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gemel.models.bundle import BundleQuery, Made, write_bundle
from gemel.models.bundle.manifest import GRAPH
from gemel.models.decoders import AUTO, choose_decoder
from gemel.models.decoders.families import PLAIN
from gemel.models.decoders.files import ModelFile
from gemel.models.decoders.heads import head_of
from gemel.models.errors import InputError
from gemel.models.graph import load_graph
from gemel.models.preprocess import Preprocess, side_or_sides

DETECTION = "detection"
SLA_MS = 200.0
"""Frigate's own."""
THRESHOLD = 0.4
"""Of scores, Frigate's for its own networks."""


def main(arguments: Sequence[str]) -> int:
    """Write the bundle of one query with the model of a file; a line on stderr and 2 where it cannot be one."""
    path, name, camera, out = arguments
    try:
        _write(ModelFile(Path(path), task=DETECTION), name, camera, Path(out))
    except InputError as error:
        print(f"{error.problem}; {error.hint}", file=sys.stderr)
        return 2
    return 0


def _write(file: ModelFile, name: str, camera: str, out: Path) -> None:
    file = _complete(file)
    assert file.size is not None
    preprocess = file.preprocess() or Preprocess(file.size, **PLAIN)
    query = BundleQuery(
        id=name, camera=camera, task=DETECTION, classes=file.classes, model=GRAPH, model_args={},
        input_size=side_or_sides(preprocess.size), preprocess=preprocess, fps=None, sla_ms=SLA_MS,
        accuracy_target=0.95, threshold=THRESHOLD,
    )  # fmt: skip
    write_bundle(out, {name: file.build().eval()}, [query], Made("zmq", "none", 0), overwrite=True)


def _complete(file: ModelFile) -> ModelFile:
    """What the file says of itself; classes that it does not name are numbers, which Frigate's label map names."""
    try:
        return file.complete()
    except InputError as error:
        if error.key != "classes":
            raise
    chosen = choose_decoder(AUTO, head_of(load_graph(file.path)), DETECTION, None, file.path)
    return replace(file, classes=tuple(map(str, range(chosen.width)))).complete()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
