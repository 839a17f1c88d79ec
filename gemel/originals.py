"""What a drift check compares a box with: the originals of its queries, in whatever they run. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gemel.edge_runtime.frames.samples import Predict
from gemel.edge_runtime.life.service import LEDGER_FILE
from gemel.models.bundle import Bundle, BundleQuery
from gemel.models.errors import InputError
from gemel.models.files.io import read_json

if TYPE_CHECKING:
    from gemel.models.workload import Query

BUNDLE_HINT = "name it with --bundle"


class Original(NamedTuple):
    """What a query of the workload is compared with: the query that answers on the box, and its own model."""

    query: Query | BundleQuery
    shipped: Query | BundleQuery
    load: Callable[[], Predict]


@dataclass(frozen=True)
class Originals:
    """The originals of a workload, the files they are read from, and the box's bundle if it was opened."""

    workload: str
    rows: tuple[Original, ...]
    inputs: tuple[tuple[str, str | Path], ...]
    bundle: Bundle | None


def read_bundle_name(spool: Path) -> str:
    """The path of the bundle that the box ran, which its ledger in the spool names; InputError where it does not."""
    path = spool / LEDGER_FILE
    name = read_json(path, BUNDLE_HINT).get("bundle")
    if not isinstance(name, str) or not name:
        raise InputError(path, "does not name the bundle that the box ran", BUNDLE_HINT, "bundle")
    return name
