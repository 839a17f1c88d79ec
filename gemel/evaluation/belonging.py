"""A bundle and the workload that it was made of."""

from __future__ import annotations

from pathlib import Path

from models.bundle import Bundle, open_bundle
from models.errors import InputError
from models.workload import Workload


def belonging(bundle: str | Path, load: Workload) -> Bundle:
    """The bundle, opened; InputError unless both hold the same queries with the same models."""
    opened = open_bundle(bundle, factories=[query.model for query in load.queries], folder=load.path.parent)
    shipped = {query.id: query for query in opened.queries}
    if set(shipped) != {query.id for query in load.queries}:
        odd = sorted(set(shipped) ^ {query.id for query in load.queries})
        raise InputError(bundle, f"does not hold the queries of {load.path.name} ({odd[0]})", "give its own workload")
    for query in load.queries:
        for key in ("task", "model", "input_size", "classes"):
            if getattr(shipped[query.id], key) != getattr(query, key):
                raise InputError(bundle, f"query {query.id} differs from {load.path.name}", "merge it again", key)
    return opened
