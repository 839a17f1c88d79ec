"""A placement: what each box is to run, and how good that is; as JSON, as text, and as files for what comes next."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from gemel.conditions import PlacementOptions
from gemel.fleet import MAX_BOXES, Boxes, Fleet
from gemel.text import percent, size, table
from models.errors import InputError
from models.io import Exact, Name, cannot_be_written, check_apart, open_atomic, read_json, validate
from models.video import is_path
from models.workload import Query, inputs_of

FILE = "placement.json"
IN_WORDS = {
    "boxes": "the cost of the boxes used",
    "frames": "frames a second in time",
    "fair": "the least part of its frames that any query has time for",
}
ENOUGH = 0.9
SLOW = "some boxes hold more than they have time for: --min-frames 0.9, or --objective fair or frames, takes more boxes"


@dataclass(frozen=True)
class PlacedBox:
    """A box that is used: its queries, the bytes that they take (unique tensors and the largest workspace), what
    sharing saves of that, and the part of their frames in time on the virtual clock.
    """

    id: str
    boxes: Boxes
    queries: tuple[str, ...]
    nbytes: int
    shared_bytes: int
    frames_fraction: float


@dataclass(frozen=True)
class Placement:
    """Which queries go on which box; keys of `to_json` are those of `gemel place --json`.

    `objective` is what the placement comes to in terms of what was `asked`, `bound` what none can pass, `gap` how far
    apart they are at most. `unplaced` says why a query has no place.
    """

    fleet: Fleet
    asked: PlacementOptions
    boxes: tuple[PlacedBox, ...]
    unplaced: Mapping[str, str]
    objective: float
    bound: float
    gap: float
    seconds: float
    moved_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {
            "fleet": self.fleet.name,
            "asked": self.asked.objective,
            "shared": self.asked.shared,
            "min_frames": self.asked.min_frames,
            "boxes": [
                {
                    "id": one.id,
                    "device": one.boxes.profile.name,
                    "memory_bytes": one.boxes.memory_bytes,
                    "cost": one.boxes.cost,
                    "queries": list(one.queries),
                    "bytes": one.nbytes,
                    "shared_bytes": one.shared_bytes,
                    "frames_fraction": one.frames_fraction,
                }
                for one in self.boxes
            ],
            "unplaced": list(self.unplaced),
            "reasons": dict(self.unplaced),
            "objective": self.objective,
            "bound": self.bound,
            "gap": self.gap,
            "seconds": self.seconds,
            "moved_bytes": self.moved_bytes,
        }

    def to_text(self) -> str:
        """The same for a terminal."""
        rows = [
            (one.id, one.boxes.profile.name, size(one.nbytes), size(one.boxes.memory_bytes), size(one.shared_bytes),
             percent(one.frames_fraction, 0), ", ".join(one.queries))
            for one in self.boxes
        ]  # fmt: skip
        there = sum(entry.count for entry in self.fleet.boxes)
        apart = "the best there is" if self.gap <= 1e-9 else f"at most {percent(self.gap)} from the best there is"
        placed = sum(len(one.queries) for one in self.boxes)
        return "\n".join([
            table(("box", "device", "takes", "of", "sharing saves", "frames in time", "queries"), rows),
            "",
            f"{placed} of {len(self.fleet.queries)} queries on {len(self.boxes)} of {there} boxes "
            f"(sharing: {self.asked.shared}); {IN_WORDS[self.asked.objective]}: {self.objective:.6g}, "
            f"bound {self.bound:.6g}: {apart}; "
            f"{size(self.moved_bytes)} of weights are not yet where they shall be",
            *(
                f"{entry.id}: {entry.profile.title} has no more than {size(entry.profile.memory_bytes)}, for all on it"
                for entry in self.fleet.boxes
                if entry.memory_bytes > entry.profile.memory_bytes
            ),
            *([SLOW] if not self.asked.timed and any(one.frames_fraction < ENOUGH for one in self.boxes) else []),
            *(f"{query} has no place: {why}" for query, why in self.unplaced.items()),
        ])  # fmt: skip

    def write(self, folder: str | Path) -> Path:
        """Write `placement.json` and a workload file for each box, BOX.yaml, which `gemel merge` takes.

        Workload files of boxes that an earlier placement in this folder used, and this one does not, are removed.
        Raises InputError where the folder cannot be written.
        """
        folder, stale = Path(folder), earlier(folder, self.fleet)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for box in self.boxes:
                with open_atomic(folder / f"{box.id}.yaml", overwrite=True) as file:
                    file.write(self._workload(box, folder.resolve()).encode())
            with open_atomic(folder / FILE, overwrite=True) as file:
                file.write(json.dumps(self.to_json(), indent=1).encode())
            for box in set(stale) - {one.id for one in self.boxes}:
                (folder / f"{box}.yaml").unlink(missing_ok=True)
        except OSError as error:
            raise cannot_be_written(folder, error) from error
        return folder / FILE

    def _workload(self, box: PlacedBox, folder: Path) -> str:
        queries = [query for query in self.fleet.queries if query.id in set(box.queries)]
        cameras = {query.camera: self.fleet.cameras[query.camera] for query in queries}
        document = {
            "name": box.id,
            "cameras": {
                camera.id: {
                    "source": _from(folder, camera.source) if is_path(camera.source) else camera.source,
                    **({} if camera.fps is None else {"fps": camera.fps}),
                }
                for camera in cameras.values()
            },
            "queries": [_document(query, folder) for query in queries],
        }
        return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


class _BoxRow(Exact):
    id: Name
    queries: list[Name]


class _Written(Exact):
    boxes: Annotated[list[_BoxRow], Field(max_length=MAX_BOXES)]


def read_placed(folder: str | Path) -> dict[str, list[str]]:
    """The queries of each box as `write` has left them in a folder; InputError where there is no placement."""
    path, remedy = Path(folder) / FILE, "name a folder that `gemel place -o` has written"
    if not Path(folder).is_dir():
        raise InputError(folder, "there is no such folder", remedy, "--from")
    document = read_json(path, remedy)
    rows = document.get("boxes")
    if isinstance(rows, list):
        rows = [{key: row[key] for key in ("id", "queries") if key in row} if isinstance(row, dict) else row
                for row in rows]  # fmt: skip
    written = validate(path, {"boxes": rows}, _Written, hint=remedy)
    for what, names in (
        ("box", [row.id for row in written.boxes]),
        ("query", [query for row in written.boxes for query in row.queries]),
    ):
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(path, f"the {what} '{twice}' stands twice", remedy, "boxes")
    return {row.id: row.queries for row in written.boxes}


def earlier(folder: str | Path, fleet: Fleet) -> list[str]:
    """The boxes whose workload files an earlier placement has left in a folder that another is to be written to.

    Raises InputError where the folder is a file, where a file in it that no placement wrote would be overwritten, and
    where what the fleet is read from would be overwritten or removed.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(folder, "is a file", "name a folder", "-o")
    boxes = list(read_placed(folder)) if (folder / FILE).exists() else []
    names = {name for entry in fleet.boxes for name in entry.names()}
    inputs = [("the fleet", fleet.path), *(one for workload in fleet.workloads for one in inputs_of(workload))]
    check_apart([("-o", folder / f"{name}.yaml") for name in sorted(names | {*boxes})], inputs)
    for name in names - {*boxes}:
        if (folder / f"{name}.yaml").exists():
            fault = "exists already, and is of no earlier placement"
            raise InputError(folder / f"{name}.yaml", fault, "move it away, or name another folder", "-o")
    return boxes


def _document(query: Query, folder: Path) -> dict[str, Any]:
    """A query as it stands in a workload file in this folder."""

    def located(value: object) -> str | None:
        return None if value is None else _from(folder, str(value)) if isinstance(value, Path) else str(value)

    keys = {
        "id": query.id, "camera": query.camera, "task": query.task, "classes": list(query.classes),
        "model": query.model, "model_args": query.model_args or None, "input_size": query.input_size,
        "weights": located(query.weights), "init": located(query.init), "fps": query.fps, "sla_ms": query.sla_ms,
        "roi": None if query.roi is None else list(query.roi), "min_score": query.min_score or None,
        "priority": query.priority, "data": located(query.data), "accuracy_target": query.accuracy_target,
    }  # fmt: skip
    return {key: value for key, value in keys.items() if value is not None}


def _from(folder: Path, path: str) -> str:
    return os.path.relpath(path, folder)


def before_of(folder: str | Path | None) -> Mapping[str, Sequence[str]]:
    """The placement in a folder, or none."""
    return {} if folder is None else read_placed(folder)
