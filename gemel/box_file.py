"""The config that `gemel run BUNDLE --camera NAME=SOURCE` stands for, written beside the bundle."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from gemel.conditions import machine_memory_bytes
from gemel.models.bundle import open_bundle
from gemel.models.errors import InputError, join_errors, join_names
from gemel.models.files.io import check_output, is_path, open_atomic
from gemel.models.files.video import without_secret

SUFFIX = ".box.yaml"
MEMORY_SHARE = 0.5
"""Of this machine's memory, for the box; the weights of a small bundle take a small part of it."""


def write_box_file(bundle: str | Path, cameras: Sequence[str], memory: str | None = None) -> Path:
    """Write `BUNDLE.box.yaml`, which replaces one that is there, and return its path.

    `cameras` are NAME=SOURCE, one for each camera that the bundle's queries look at. Raises InputError for names that
    the bundle does not have, or that are missing or given twice.
    """
    bundle = Path(bundle)
    names = list(dict.fromkeys(query.camera for query in open_bundle(bundle).queries))
    sources = read_cameras(cameras)
    unseen = (f"no query of {bundle} looks at '{name}'" for name in sources if name not in names)
    faults = [InputError("--camera", problem, f"choose of: {join_names(names)}") for problem in unseen]
    if missing := [name for name in names if name not in sources]:
        have = "have" if len(missing) > 1 else "has"
        problem, hint = f"{join_names(missing)} of {bundle} {have} no source", f"add {missing[0]}=SOURCE"
        faults.append(InputError("--camera", problem, hint))
    if faults:
        raise join_errors(faults)
    config = {
        "bundle": os.path.abspath(bundle),
        "memory": memory or choose_memory(),
        "cameras": {name: {"source": sources[name]} for name in names},
        "http": {"bind": "127.0.0.1:8080"},
    }
    path = check_output(bundle.with_name(bundle.name + SUFFIX), overwrite=True)
    with open_atomic(path, overwrite=True) as file:
        file.write(yaml.safe_dump(config, sort_keys=False).encode())
    return path


def show_box_file(path: Path) -> str:
    """The written config as YAML that runs from any folder, without users and passwords of its cameras."""
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    for camera in config["cameras"].values():
        camera["source"] = without_secret(camera["source"])
    return f"# {path}\n{yaml.safe_dump(config, sort_keys=False)}"


def write_and_show(bundle: str, cameras: Sequence[str], as_json: bool) -> str:
    """Write the config, show it on stderr, or as a line of the log, and return its path."""
    path = write_box_file(bundle, cameras)
    shown = show_box_file(path)
    if as_json:
        logging.getLogger("gemel.run").info("this command stands for the config %s", shown)
    else:
        print(shown, end="", file=sys.stderr, flush=True)
    return str(path)


def read_cameras(cameras: Sequence[str]) -> dict[str, str]:
    """Name -> source (of files an absolute path) of cameras given as NAME=SOURCE.

    Raises InputError for any other text and for a name that is given twice.
    """
    sources: dict[str, str] = {}
    for text in cameras:
        name, _, source = text.partition("=")
        if not name or not source:
            raise InputError("--camera", f"'{text}' is not NAME=SOURCE", "give gate=clip.mp4, for instance")
        if name in sources:
            raise InputError("--camera", f"'{name}' is given twice", "give each camera once")
        sources[name] = os.path.abspath(source) if is_path(source) else source
    return sources


def choose_memory() -> str:
    """The part of this machine's memory that a box gets where nothing says it."""
    return f"{max(1, int(MEMORY_SHARE * machine_memory_bytes()) // 2**20)}MiB"
