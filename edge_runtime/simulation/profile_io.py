"""Measured profiles: what a bundle's queries cost on one machine, kept beside the bundle as BUNDLE.profile.json."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from gemel.edge_runtime.scheduler.costs import BatchCost, Costs, JointCost, QueryCost
from gemel.edge_runtime.scheduler.types import MAX_AGES, Curve, monotone_curve
from gemel.models.bundle import Bundle
from gemel.models.errors import InputError
from gemel.models.files.extras import has_cuda, is_installed, version_of
from gemel.models.files.io import Exact, open_atomic, read_json, validate
from gemel.models.notes import add_note
from gemel.models.process import count_threads

PROFILE_FORMAT = 3
PROFILE_SUFFIX = ".profile.json"
MAX_PAGES = 100_000
"""Ranges of pages, far above those that are made."""
MAX_PROFILE_BATCH = 1024
"""Frames of a batch, far above any that is measured."""
PROFILE_HINT = "run `gemel profile BUNDLE` here"
STALENESS_HINT = "run `gemel profile BUNDLE --workload WORKLOAD`"


@dataclass(frozen=True, slots=True)
class QueryProfile:
    """One query measured: seconds of a load of all its weights, its runs by batch on `engine`, and the accuracy of its
    answers by their age in frames, where footage was at hand. `pages` names the ranges of pages that it reads, where
    its weights are mapped."""

    load_s: float
    batches: tuple[BatchCost, ...]
    staleness: Curve = ()
    engine: str = "torch"
    pages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JointProfile:
    """One pass for frames of these queries, by the frames of all together."""

    queries: tuple[str, ...]
    batches: tuple[BatchCost, ...]


@dataclass(frozen=True, slots=True)
class MeasuredProfile:
    """A bundle's queries measured on `machine`; `digest` is the bundle's.

    `pages` are the bytes of ranges of mapped weights by name.
    """

    digest: str
    machine: Mapping[str, Any]
    device: str
    engine: str
    copy_bytes_per_s: float
    load_latency_s: float
    queries: Mapping[str, QueryProfile]
    joint: tuple[JointProfile, ...] = ()
    pages: Mapping[str, int] = field(default_factory=dict)


_Text = Annotated[str, Field(max_length=500)]
_Seconds = Annotated[float, Field(ge=0, le=86_400)]


_PageBytes = Annotated[int, Field(ge=1, le=2**50)]


class _BatchKeys(Exact):
    count: Annotated[int, Field(ge=1, le=MAX_PROFILE_BATCH)]
    run_s: Annotated[float, Field(ge=1e-9, le=86_400)]
    workspace_bytes: Annotated[int, Field(ge=0, le=2**50)]


class _QueryKeys(Exact):
    load_s: _Seconds
    batches: Annotated[list[_BatchKeys], Field(min_length=1, max_length=MAX_PROFILE_BATCH)]
    staleness: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(max_length=MAX_AGES, default_factory=list)]
    engine: _Text
    pages: Annotated[list[_Text], Field(max_length=MAX_PAGES, default_factory=list)]


class _JointKeys(Exact):
    queries: Annotated[list[_Text], Field(min_length=2)]
    batches: Annotated[list[_BatchKeys], Field(min_length=1, max_length=MAX_PROFILE_BATCH)]


class _MachineKeys(Exact, extra="allow"):
    __pydantic_extra__: dict[str, _Text | int | None]
    name: _Text


class _ProfileKeys(Exact):
    profile: Annotated[int, Field(ge=PROFILE_FORMAT, le=PROFILE_FORMAT)]
    digest: _Text
    machine: _MachineKeys
    device: Literal["cpu", "cuda"]
    engine: _Text
    copy_bytes_per_s: Annotated[float, Field(ge=1, le=1e15)]
    load_latency_s: _Seconds
    queries: Annotated[dict[_Text, _QueryKeys], Field(min_length=1)]
    joint: Annotated[list[_JointKeys], Field(default_factory=list)]
    pages: Annotated[dict[_Text, _PageBytes], Field(max_length=MAX_PAGES, default_factory=dict)]


def describe_machine(device: str) -> dict[str, Any]:
    """What must be equal for measurements to hold elsewhere: the processor or card, its cores, torch's version."""
    name = _processor()
    if device == "cuda" and is_installed("torch"):
        import torch

        name = torch.cuda.get_device_name()
    return {"name": name, "cores": os.cpu_count(), "threads": count_threads(), "torch": version_of("torch")}


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def profile_path(bundle: str | Path) -> Path:
    """Where a bundle's profile lies: beside it."""
    return Path(f"{bundle}{PROFILE_SUFFIX}")


def write_profile(bundle: str | Path, profile: MeasuredProfile) -> Path:
    """Write a profile beside its bundle, over an older one."""
    path = profile_path(bundle)
    document = {"profile": PROFILE_FORMAT, **asdict(profile)}
    with open_atomic(path, overwrite=True) as file:
        file.write(json.dumps(document, indent=1).encode())
    return path


def read_profile(bundle: Bundle) -> MeasuredProfile:
    """The profile beside a bundle; InputError, in one line, when there is none or it is of another bundle."""
    path = profile_path(bundle.path)
    if not path.exists():
        raise InputError(path, "the costs of this bundle were never measured", PROFILE_HINT)
    found = validate(path, read_json(path, PROFILE_HINT), _ProfileKeys, hint=PROFILE_HINT)
    queries = dict[str, QueryProfile]()
    for query, one in found.queries.items():
        batches = _read_batches(path, one.batches, f"queries.{query}.batches")
        queries[query] = QueryProfile(one.load_s, batches, monotone_curve(one.staleness), one.engine, tuple(one.pages))
    if found.digest != bundle.digest or set(queries) != {query.id for query in bundle.queries}:
        raise InputError(path, "was measured with another bundle of this name", PROFILE_HINT)
    named = [query for one in found.joint for query in one.queries]
    if len(set(named)) < len(named) or not set(named) <= queries.keys():
        raise InputError(path, "names queries that are unknown or in two passes", PROFILE_HINT, "joint")
    joint = tuple(JointProfile(tuple(one.queries), _read_batches(path, one.batches, "joint")) for one in found.joint)
    if not {name for one in queries.values() for name in one.pages} <= found.pages.keys():
        raise InputError(path, "names ranges of pages that it does not have", PROFILE_HINT, "pages")
    return MeasuredProfile(
        found.digest, found.machine.model_dump(), found.device, found.engine, found.copy_bytes_per_s,
        found.load_latency_s, queries, joint, found.pages,
    )  # fmt: skip


def _read_batches(path: Path, rows: Iterable[_BatchKeys], key: str) -> tuple[BatchCost, ...]:
    batches = tuple(BatchCost(**dict(batch)) for batch in rows)
    if batches[0].count != 1 or any(a.count >= b.count for a, b in pairwise(batches)):
        raise InputError(path, "their counts do not ascend from 1", PROFILE_HINT, key)
    return batches


def read_staleness(bundle: Bundle) -> dict[str, Curve]:
    """The staleness curves of the profile beside a bundle, which hold for any machine; InputError without any."""
    found = {query: one.staleness for query, one in read_profile(bundle).queries.items() if one.staleness}
    if not found:
        fault = "`objective: accuracy` needs to know what answers are worth as they age, which was never measured"
        raise InputError(profile_path(bundle.path), fault, STALENESS_HINT)
    return found


def machine_mismatch(profile: MeasuredProfile, device: str) -> str | None:
    """How the machine that was measured differs from this one, in words; None when it does not."""
    here = describe_machine(device)
    differing = [
        f"{key} {profile.machine.get(key)!r}, here {value!r}"
        for key, value in here.items()
        if profile.machine.get(key) != value
    ]
    if profile.device != device:
        differing.insert(0, f"device {profile.device}, here {device}")
    return "; ".join(differing) or None


def note_machine(bundle: Bundle, profile: MeasuredProfile) -> None:
    """Note that costs are used which were measured on another machine than this one."""
    mismatch = machine_mismatch(profile, profile.device if has_cuda() else "cpu")
    if mismatch is not None:
        text = f"its costs, measured on another machine ({mismatch}), are used as they are"
        add_note(profile_path(bundle.path), text, f"if the box is this machine, {PROFILE_HINT}")


def measured_costs(bundle: Bundle, profile: MeasuredProfile, in_pages: bool = False) -> Costs:
    """The costs of a bundle's queries as they were measured; `in_pages`: their weights are the mapped ones, if any."""
    queries, sizes = {}, dict[str, int]()
    for query in bundle.queries:
        measured = profile.queries[query.id]
        if in_pages and profile.pages:
            weights = {name: profile.pages[name] for name in measured.pages}
        else:
            weights = {name: bundle.nbytes(name) for name in bundle.names_in_order(query.id)}
        sizes |= weights
        queries[query.id] = QueryCost.of_batches(weights, query.sla_ms / 1000, monotone_batches(measured.batches))
    joint = tuple(
        JointCost(
            one.queries,
            QueryCost.of_batches((), min(queries[query].sla_s for query in one.queries), monotone_batches(one.batches)),
        )
        for one in profile.joint
    )
    return Costs(queries, sizes, profile.copy_bytes_per_s, profile.load_latency_s, joint=joint)


def monotone_batches(batches: Iterable[BatchCost]) -> tuple[BatchCost, ...]:
    """Batches by size, none quicker or smaller than one with fewer frames, which would be noise."""
    found, run_s, workspace_bytes = list[BatchCost](), 0.0, 0
    for batch in sorted(batches, key=lambda batch: batch.count):
        run_s, workspace_bytes = max(batch.run_s, run_s), max(batch.workspace_bytes, workspace_bytes)
        found.append(BatchCost(batch.count, run_s, workspace_bytes))
    return tuple(found)
