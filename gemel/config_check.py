"""`gemel config check`: whether this version reads a file as it is, and what has changed since it was written.

All faults of a workload, box or fleet file are named at once, and a bundle's format.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from gemel.edge_runtime.life.config import BoxConfig, any_device, load_config
from gemel.models.bundle import Bundle, open_bundle
from gemel.models.errors import InputError, join_errors, join_names
from gemel.models.files.io import UNKNOWN_KEY, read_mapping

BUNDLE_SUFFIX = ".safetensors"
KINDS = {"box": ("bundle",), "fleet": ("boxes", "workloads"), "workload": ("queries", "cameras")}
"""The keys that tell a file's kind, the first that fits."""
CHANGES = (
    (r"cameras\.[^.]+\.decoder", "0.2.0", "is now `decode`"),
    (r"stream", "0.2.0", "is now `overflow`"),
)
"""A pattern of keys of earlier versions, the version that reads them no longer, and what became of them."""


@dataclass(frozen=True)
class ConfigCheck:
    """What a file is, the version that reads it, and what is named but not used, one line each."""

    file: str
    kind: str
    version: str
    unused: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The keys of `gemel config check --json`."""
        return {"ok": True, **asdict(self), "unused": list(self.unused)}

    def to_text(self) -> str:
        """One line, and one for each thing that is not used."""
        return "\n".join([f"{self.file}: a {self.kind} that Gemel {self.version} reads", *self.unused])


def check_config(path: str | Path) -> ConfigCheck:
    """Read a workload, box or fleet file, or a bundle, as the commands do; nothing runs, and footage need not be there.

    A box file is compared with its bundle where that exists. Raises InputError, with all other faults as its `others`.
    """
    path, version = Path(path), metadata.version("gemel")
    if path.suffix == BUNDLE_SUFFIX:
        open_bundle(path)
        return ConfigCheck(str(path), "bundle", version)
    kind = kind_of(path)
    try:
        unused = _READERS[kind](path)
    except InputError as error:
        raise name_changes(error) from error
    return ConfigCheck(str(path), kind, version, unused)


def kind_of(path: Path) -> str:
    """Which kind of file this is, by its keys; InputError where it is none."""
    keys = read_mapping(path, "config", "`bundle:` (a box), `queries:` (a workload) or `boxes:` (a fleet)")
    for kind, marks in KINDS.items():
        if any(mark in keys for mark in marks):
            return kind
    problem = f"has neither {join_names([marks[0] for marks in KINDS.values()])}"
    raise InputError(path, problem, "give a workload, box or fleet file, or a bundle")


def name_changes(error: InputError) -> InputError:
    """The error, where its faults are keys of earlier versions with what became of these."""
    return join_errors([_name_change(fault) for fault in (error, *error.others)])


def _name_change(fault: InputError) -> InputError:
    for pattern, version, text in CHANGES:
        if re.fullmatch(pattern, fault.key.split(" ")[0]):
            return InputError(fault.where, f"changed in {version}: it {text}", "correct it", fault.key)
    later = f"; a version after {metadata.version('gemel')} may know it" if fault.problem == UNKNOWN_KEY else ""
    return InputError(fault.where, fault.problem, fault.hint + later, fault.key)


def _read_box(path: Path) -> tuple[str, ...]:
    config = load_config(path, device_of=any_device)
    if not config.bundle.is_file():
        return (f"{config.bundle} is not there: cameras and queries are not compared with it",)
    return _compare(config, open_bundle(config.bundle))


def _compare(config: BoxConfig, bundle: Bundle) -> tuple[str, ...]:
    """Cameras and queries of a box file beside those of its bundle; InputError for those that there are not."""
    queries = {query.id: query for query in bundle.queries}
    cameras = {query.camera for query in bundle.queries}
    absent = [(f"cameras.{name}", "this camera is missing", "add its source") for name in cameras - set(config.cameras)]
    hint = f"the bundle has {join_names(queries)}"
    absent += [
        (f"queries.{name}", "the bundle has no such query", hint) for name in config.rules if name not in queries
    ]
    if absent:
        raise join_errors([InputError(config.path, problem, hint, key) for key, problem, hint in sorted(absent)])
    return tuple(f"camera {name}: no query of the bundle looks at it" for name in config.cameras if name not in cameras)


def _read_workload(path: Path) -> tuple[str, ...]:
    from gemel.models.workload import load_workload

    workload = load_workload(path)
    watched = {query.camera for query in workload.queries}
    return tuple(f"camera {name}: no query looks at it" for name in workload.cameras if name not in watched)


def _read_fleet(path: Path) -> tuple[str, ...]:
    from gemel.fleet import load_fleet

    load_fleet(path)
    return ()


_READERS: dict[str, Callable[[Path], tuple[str, ...]]] = {
    "box": _read_box, "workload": _read_workload, "fleet": _read_fleet,
}  # fmt: skip
