"""What `gemel prove` found, in a file beside the bundle: the bundle itself, which may be signed, is not changed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from gemel.models.bundle import Bundle
from gemel.models.errors import InputError
from gemel.models.files.io import Exact, Name, open_atomic, read_json, validate

SUFFIX = ".proof.json"
"""Appended to the bundle's name."""
MAX_BYTES = 1 << 24
HINT = "run `gemel prove` again"


class ProofRow(Exact, populate_by_name=True):
    """One query (`models.measures.evaluation.Evidence`), and the digest of the data that it was proven on."""

    id: Name
    state: Literal["proven", "unchanged", "not proven"]
    proven: bool
    lower_end: float | None = Field(ge=0, le=1e6)
    source: str | None = Field(alias="from", max_length=20)
    needs: str = Field(max_length=1000)
    answers_kept: float | None = Field(ge=0, le=1)
    answers_kept_end: float | None = Field(ge=0, le=1)
    footage: str = Field(max_length=64)
    flips: str = Field(default="", max_length=1000)


class ProofDocument(Exact):
    """A proof of the bundle of this SHA-256, and when it was made."""

    format: Literal[1] = 1
    bundle: str = Field(max_length=64)
    date: str = Field(max_length=40)
    queries: list[ProofRow]


def proof_path(bundle: Path) -> Path:
    """The file of a bundle's proof."""
    return Path(f"{bundle}{SUFFIX}")


def write_proofs(bundle: Bundle, rows: Sequence[ProofRow]) -> Path:
    """Write a proof beside its bundle; InputError where that fails."""
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    document = ProofDocument(bundle=bundle.digest, date=date, queries=list(rows))
    path = proof_path(bundle.path)
    with open_atomic(path, overwrite=True) as file:
        file.write(json.dumps(document.model_dump(by_alias=True), indent=1).encode())
    return path


def find_proofs(bundle: Bundle) -> Mapping[str, dict[str, Any]]:
    """The rows of the file beside a bundle by query, if it is of this bundle; none where it is damaged."""
    path = proof_path(bundle.path)
    if not path.exists():
        return {}
    try:
        document = validate(path, read_json(path, HINT, MAX_BYTES), ProofDocument, hint=HINT)
    except InputError:
        return {}
    if document.bundle != bundle.digest:
        return {}
    return {row.id: row.model_dump(by_alias=True) for row in document.queries}
