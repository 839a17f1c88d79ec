"""Looks at the data that prove: each is recorded by content, since the best of many looks proves little.

The first merged model that is tried on footage (or on labelled val, where there is none) has the whole error, later
ones share what `merger.proof.PROOF.later_looks` leaves. The same model is no new look.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

from pydantic import Field
from torch import Tensor

from gemel.merger.proof import error_of_look
from gemel.models.data import PreparedFrames
from gemel.models.errors import InputError
from gemel.models.files.io import Exact, open_atomic, read_json_lines, validate
from gemel.models.footage import ProofFrames, read_thumbs
from gemel.models.notes import add_note

SUFFIX = ".looks.jsonl"
"""Appended to the name of the workload file."""
MAX_BYTES, MAX_LINE_BYTES = 16 << 20, 1 << 16


class Look(Exact):
    """A merged model of a query (SHA-256) that was tried on data (SHA-256), the error it had, and when."""

    query: str
    data: str
    model: str
    error: float = Field(ge=0, le=1)
    date: str


class LookFile:
    """The looks at the data of one workload, in a file beside it."""

    def __init__(self, workload: Path) -> None:
        self.path = workload.with_name(workload.name + SUFFIX)
        rows = read_json_lines(self.path, "", MAX_BYTES, MAX_LINE_BYTES, torn=True) if self.path.exists() else ()
        self.looks = [validate(f"{self.path}: line {line}", row, Look) for line, row in rows]

    def error(self, query: str, data: str, model: str) -> float:
        """The error that a proof of this model on this data has; models of one look have the same."""
        looks = [look for look in self.looks if look.query == query and look.data == data]
        for look in looks:
            if look.model == model:
                return look.error
        return error_of_look(len({look.error for look in looks}))

    def record(self, query: str, data: str, *models: str) -> float:
        """Add a look at models that are proven in this order, if it is a new one; its error."""
        error = min(self.error(query, data, model) for model in models)
        for model in models:
            if not any((look.query, look.data, look.model) == (query, data, model) for look in self.looks):
                date = datetime.now(timezone.utc).isoformat(timespec="seconds")
                self.looks.append(Look(query=query, data=data, model=model, error=error, date=date))
        return error

    def save(self) -> None:
        """Write the file, if there was any look; where that is not possible, a note says so."""
        if not self.looks:
            return
        text = "".join(json.dumps(look.model_dump()) + "\n" for look in self.looks)
        try:
            with open_atomic(self.path, overwrite=True) as file:
                file.write(text.encode())
        except (OSError, InputError) as error:
            add_note(self.path, f"cannot be written: {error}", "looks at footage are not counted")


def digest_data(proof: ProofFrames | None, val: PreparedFrames) -> str:
    """What tells apart the data that prove, by content: footage, or val."""
    if proof is not None and proof.digest:
        return proof.digest
    return hashlib.sha256(read_thumbs(val).tobytes()).hexdigest()


def digest_state(state: Mapping[str, Tensor]) -> str:
    """What tells models apart, by content."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
