"""YAML files people write, read against a schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.errors import InputError
from models.files.bounded import Fault, read_bounded
from models.files.bounded_yaml import parsed
from models.files.schema import Keys, checked

MAX_BYTES = 2**20


def read_yaml(path: Path, schema: type[Keys], kind: str, start: str) -> Keys:
    """The file as an instance of `schema`; `kind` names such files and `start` the keys one begins with.

    Raises InputError for a file that cannot be read, is not YAML or no mapping, or does not fit the schema.
    """
    return checked(path, read_mapping(path, kind, start), schema)


def read_mapping(path: Path, kind: str, start: str) -> dict[str, Any]:
    """The file as a mapping that is held against no schema yet; otherwise like `read_yaml`."""
    data = read_bounded(path, MAX_BYTES, f"give an existing {kind}")
    try:
        document = parsed(data)
    except Fault as fault:
        raise InputError(path, f"is not YAML: {fault.text}", "mend the file") from fault
    if not isinstance(document, dict):
        raise InputError(path, "is not a mapping", f"start with {start}")
    return document
