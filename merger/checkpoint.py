"""The state of a search after its last finished round, so that an interrupted merge goes on from there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from merger.workbench import Merged, Workbench, snapshot
from models.atomic import writing
from models.errors import InputError
from models.plan import SharingPlan
from models.weights import save_weights

INDEX = "state.json"


class Checkpoint:
    """A folder beside the bundle: an index and the weights it points to; the index is replaced last, in one step.

    `identity` tells one merge from another (workload, method, seed, options); a folder of another one is refused.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], resume: bool) -> None:
        self.folder, self.identity = folder, json.loads(json.dumps(identity))
        self.rounds, self.seconds, self.work = 0, 0.0, 0.0
        self.rate: float | None = None
        self.log: list[dict[str, Any]] = []
        self._index: dict[str, Any] | None = None
        if (folder / INDEX).exists():
            if not resume:
                raise InputError(folder, "holds an interrupted merge", "give --resume to go on, or remove the folder")
            self._open()

    def merged(self, bench: Workbench) -> Merged:
        """What was accepted last; the originals and nothing shared at the start."""
        originals = {query: snapshot(model) for query, model in bench.originals.items()}
        if self._index is None:
            return Merged(SharingPlan(), originals)
        bench.work.total = self.work
        stored = load_file(self.folder / self._index["weights"])
        states = {
            query: {name: stored[f"{query}/{name}"].to(bench.device) for name in state}
            for query, state in originals.items()
        }
        return Merged(SharingPlan.from_json(self._index["plan"]), states)

    def save(
        self, merged: Merged, rounds: int, rows: list[dict[str, Any]], work: float, seconds: float, rate: float
    ) -> None:
        """Store the state after a round and forget the one before."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log += rows
        weights = f"weights-{rounds}.safetensors"
        tensors = {f"{query}/{name}": t for query, state in merged.states.items() for name, t in state.items()}
        save_weights(self.folder / weights, tensors)
        before = self._index["weights"] if self._index else None
        self._index = {
            "identity": self.identity, "rounds": rounds, "seconds": seconds, "work": work, "rate": rate,
            "plan": merged.plan.to_json(), "weights": weights, "log": self.log,
        }  # fmt: skip
        with writing(self.folder / INDEX, overwrite=True) as file:
            file.write(json.dumps(self._index).encode())
        if before and before != weights:
            (self.folder / before).unlink(missing_ok=True)

    def remove(self) -> None:
        """The merge is done; the folder is needed no longer."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _open(self) -> None:
        path = self.folder / INDEX
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
            self.rounds, self.seconds, self.work = int(index["rounds"]), float(index["seconds"]), float(index["work"])
            self.rate, self.log = float(index["rate"]), list(index["log"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(path, f"is no checkpoint: {error!r}", "remove the folder and start again") from error
        if index["identity"] != self.identity:
            changed = [key for key in self.identity if self.identity[key] != index["identity"].get(key)]
            raise InputError(
                path, f"belongs to another merge ({', '.join(changed)} differ)", "remove the folder, or merge as before"
            )
        self._index = index
