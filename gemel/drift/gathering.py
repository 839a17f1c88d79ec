"""The samples of a spool that a check can use: those of one bundle, by query; the spool may be anybody's."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.spool.sample import SUFFIX, read_head
from edge_runtime.spool.settings import SAMPLES
from models.errors import InputError
from models.workload import Query

MAX_SAMPLES = 100_000
UNREADABLE, OTHER_BUNDLE, UNKNOWN = "unreadable", "of another bundle", "of no query of the workload"
"""Why a sample is left out."""


@dataclass(frozen=True)
class Gathered:
    """The `bundle` (the first digits of its SHA-256) that is judged, for each query its samples in the order of time,
    and how many samples are left out, by reason.
    """

    bundle: str
    samples: Mapping[str, tuple[Path, ...]]
    left_out: Counter[str]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is remembered of a sample."""

    captured_at: float
    path: Path
    query: str
    bundle: str


def gather(spool: Path, queries: Iterable[Query], bundle: str | None) -> Gathered:
    """Look at every sample of a spool; those of this bundle are taken, or of the one that served last.

    Raises InputError where there is no sample at all, or more than MAX_SAMPLES.
    """
    left_out: Counter[str] = Counter()
    found: list[_Seen] = []
    for path in _files(spool):
        try:
            head = read_head(path)
        except InputError:
            left_out[UNREADABLE] += 1
        else:
            found.append(_Seen(head.captured_at, path, head.query, head.bundle))
    if not found:
        fault = f"none of its {left_out.total()} samples can be read" if left_out else "holds no samples"
        raise InputError(spool, fault, "name the `spool` of a box, with its folder `samples`")
    found.sort(key=lambda one: (one.captured_at, one.path.name))
    judged = bundle or found[-1].bundle
    samples: dict[str, list[Path]] = {query.id: [] for query in queries}
    for one in found:
        if one.bundle != judged:
            left_out[OTHER_BUNDLE] += 1
        elif one.query not in samples:
            left_out[UNKNOWN] += 1
        else:
            samples[one.query].append(one.path)
    return Gathered(judged, {query: tuple(paths) for query, paths in samples.items()}, left_out)


def _files(spool: Path) -> list[Path]:
    folder, paths = spool / SAMPLES, []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                    paths.append(folder / entry.name)
                if len(paths) > MAX_SAMPLES:
                    fault = f"holds more than {MAX_SAMPLES:,} samples"
                    raise InputError(folder, fault, "remove the oldest")
    except OSError as error:
        remedy = "name the `spool` of a box, with its folder `samples`"
        raise InputError(folder, f"cannot be read: {error.strerror}", remedy) from error
    return paths
