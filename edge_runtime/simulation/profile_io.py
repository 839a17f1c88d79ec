"""Measured profiles: what a bundle's queries cost on one machine, kept beside the bundle as BUNDLE.profile.json."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from edge_runtime.scheduler.costs import BatchCost, Costs, JointCost, QueryCost
from edge_runtime.scheduler.sessions import SessionCost
from edge_runtime.scheduler.types import MAX_AGES, Curve, monotone_curve
from models.bundle import Bundle
from models.errors import InputError
from models.io import Exact, open_atomic, read_json, validate
from models.notes import add_note

PROFILE_FORMAT = 2
PROFILE_SUFFIX = ".profile.json"
MAX_PROFILE_BATCH = 1024
"""Frames of a batch, far above any that is measured."""
PROFILE_HINT = "run `gemel profile BUNDLE` here"
STALENESS_HINT = "run `gemel profile BUNDLE --workload WORKLOAD`"


@dataclass(frozen=True, slots=True)
class QueryProfile:
    """One query measured: seconds of a load of all its tensors, its runs by batch on `engine`, and the accuracy of its
    answers by their age in frames, where footage was at hand."""

    load_s: float
    batches: tuple[BatchCost, ...]
    staleness: Curve = ()
    engine: str = "torch"


@dataclass(frozen=True, slots=True)
class JointProfile:
    """One pass for frames of these queries, by the frames of all together."""

    queries: tuple[str, ...]
    batches: tuple[BatchCost, ...]


@dataclass(frozen=True, slots=True)
class MeasuredProfile:
    """A bundle's queries measured on `machine`; `digest` is the bundle's.

    `sessions` are what engines with weights of their own would cost where the budget allows them.
    """

    digest: str
    machine: Mapping[str, Any]
    device: str
    engine: str
    copy_bytes_per_s: float
    load_latency_s: float
    queries: Mapping[str, QueryProfile]
    joint: tuple[JointProfile, ...] = ()
    sessions: tuple[SessionCost, ...] = ()


_Text = Annotated[str, Field(max_length=500)]
_Seconds = Annotated[float, Field(ge=0, le=86_400)]


class _BatchKeys(Exact):
    count: Annotated[int, Field(ge=1, le=MAX_PROFILE_BATCH)]
    run_s: Annotated[float, Field(ge=1e-9, le=86_400)]
    workspace_bytes: Annotated[int, Field(ge=0, le=2**50)]


class _QueryKeys(Exact):
    load_s: _Seconds
    batches: Annotated[list[_BatchKeys], Field(min_length=1, max_length=MAX_PROFILE_BATCH)]
    staleness: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(max_length=MAX_AGES, default_factory=list)]
    engine: _Text


class _JointKeys(Exact):
    queries: Annotated[list[_Text], Field(min_length=2)]
    batches: Annotated[list[_BatchKeys], Field(min_length=1, max_length=MAX_PROFILE_BATCH)]


class _SessionKeys(Exact):
    engine: _Text
    nbytes: Annotated[int, Field(ge=0, le=2**50)]
    batches: Annotated[dict[_Text, Annotated[list[_BatchKeys], Field(min_length=1)]], Field(min_length=1)]


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
    sessions: Annotated[list[_SessionKeys], Field(max_length=1000, default_factory=list)]


def describe_machine(device: str) -> dict[str, Any]:
    """What must be equal for measurements to hold elsewhere: the processor or card, its cores, torch's version."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else _processor()
    return {"name": name, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__}


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
        queries[query] = QueryProfile(one.load_s, batches, monotone_curve(one.staleness), one.engine)
    if found.digest != bundle.digest or set(queries) != {query.id for query in bundle.queries}:
        raise InputError(path, "was measured with another bundle of this name", PROFILE_HINT)
    named = [query for one in found.joint for query in one.queries]
    if len(set(named)) < len(named) or not set(named) <= queries.keys():
        raise InputError(path, "names queries that are unknown or in two passes", PROFILE_HINT, "joint")
    joint = tuple(JointProfile(tuple(one.queries), _read_batches(path, one.batches, "joint")) for one in found.joint)
    sessions = []
    for index, one in enumerate(found.sessions):
        if not one.batches.keys() <= queries.keys():
            raise InputError(path, "has queries that the bundle has not", PROFILE_HINT, f"sessions[{index}]")
        runs = {query: _read_batches(path, own, f"sessions[{index}].{query}") for query, own in one.batches.items()}
        sessions.append(SessionCost(one.engine, one.nbytes, runs))
    return MeasuredProfile(
        found.digest, found.machine.model_dump(), found.device, found.engine, found.copy_bytes_per_s,
        found.load_latency_s, queries, joint, tuple(sessions),
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
    import torch

    mismatch = machine_mismatch(profile, profile.device if torch.cuda.is_available() else "cpu")
    if mismatch is not None:
        text = f"its costs, measured on another machine ({mismatch}), are used as they are"
        add_note(profile_path(bundle.path), text, f"if the box is this machine, {PROFILE_HINT}")


def measured_costs(bundle: Bundle, profile: MeasuredProfile) -> Costs:
    """The costs of a bundle's queries as they were measured."""
    queries = {
        query.id: QueryCost.of_batches(
            bundle.names_in_order(query.id), query.sla_ms / 1000, monotone_batches(profile.queries[query.id].batches)
        )
        for query in bundle.queries
    }
    names = {name for cost in queries.values() for name in cost.tensors}
    joint = tuple(
        JointCost(
            one.queries,
            QueryCost.of_batches((), min(queries[query].sla_s for query in one.queries), monotone_batches(one.batches)),
        )
        for one in profile.joint
    )
    return Costs(
        queries, {name: bundle.nbytes(name) for name in sorted(names)}, profile.copy_bytes_per_s,
        profile.load_latency_s, joint=joint,
    )  # fmt: skip


def monotone_batches(batches: Iterable[BatchCost]) -> tuple[BatchCost, ...]:
    """Batches by size, none quicker or smaller than one with fewer frames, which would be noise."""
    found, run_s, workspace_bytes = list[BatchCost](), 0.0, 0
    for batch in sorted(batches, key=lambda batch: batch.count):
        run_s, workspace_bytes = max(batch.run_s, run_s), max(batch.workspace_bytes, workspace_bytes)
        found.append(BatchCost(batch.count, run_s, workspace_bytes))
    return tuple(found)
