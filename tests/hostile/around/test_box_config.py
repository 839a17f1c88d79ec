"""Every key of a box config, as its schema tells them: what makes no sense is one line with file and key."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from edge_runtime.config import _BoxKeys, _CameraKeys, _HttpKeys, _SpoolKeys
from edge_runtime.sinks.jsonl import JsonLinesKeys
from tests.exhaustive import one_in
from tests.hostile.harness import refused
from tests.hostile.samples import BUNDLE

SOUND: dict[str, Any] = {
    "bundle": BUNDLE, "budget": "64MiB", "device": "cpu", "engine": "torch",
    "cameras": {"gate": {"source": "gate.mp4", "fps": 5}}, "sinks": [{"kind": "jsonl", "path": "results.jsonl"}],
    "http": {"bind": "127.0.0.1:0"}, "spool": {"path": "spool"},
}  # fmt: skip
SCHEMAS: dict[tuple[str | int, ...], type[BaseModel]] = {
    (): _BoxKeys, ("cameras", "gate"): _CameraKeys, ("sinks", 0): JsonLinesKeys,
    ("http",): _HttpKeys, ("spool",): _SpoolKeys,
}  # fmt: skip
FREE_TEXT = {"path", "trace", "source", "bundle", "spool", "public_key", "token_file"}
"""Keys any text is a value of."""
WORDS: tuple[Any, ...] = ("nope", "", "${HOME}", "http://[::1", "a\nb", "../../../etc", "9" * 400, "-1")
ODD: tuple[Any, ...] = (None, [], {}, [[]], {"a": 1}, -1, 0, float("nan"), float("inf"), 1e300, 2**70, "2026-13-45")
PATHS = ("absent/x", ".", "/dev/zero/x", "box.yaml/x", "n" * 300, "")


def keys() -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Where every key stands, and its name."""
    for at, schema in SCHEMAS.items():
        for name, field in schema.model_fields.items():
            yield at, field.alias or name


def write(house: Path, at: tuple[str | int, ...], name: str, value: Any) -> None:
    """The config with one value exchanged."""
    document = copy.deepcopy(SOUND)
    inner: Any = document
    for step in at:
        inner = inner[step]
    inner[name] = value
    (house / "box.yaml").write_text(yaml.safe_dump(document))


def is_sound(at: tuple[str | int, ...], name: str, value: Any) -> bool:
    """Whether a value means what it says: a key left out, a number where one may stand, a path like any other."""
    default = SCHEMAS[at].model_fields[name].default
    if value == default or (value is None and default is None):
        return True
    if name in ("path", "trace", "spool") and value == "2026-13-45":
        return True
    if value == "." and (name == "spool" or at == ("spool",)):
        return True
    if (name == "source" and value in (0, "2026-13-45")) or (name == "http" and value == {}):
        return True
    return (name == "factories" and value == []) or (name in ("loop", "overflow", "keep", "canary") and value == 0)


@pytest.fixture(scope="module")
def folder(whole_house: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("box")
    for name in (BUNDLE, "gate.mp4"):
        (made / name).symlink_to(whole_house / name)
    return made


@pytest.mark.parametrize(("at", "name"), one_in(2, keys()), ids=str)
def test_a_value_that_makes_no_sense_names_file_and_key(folder: Path, at: tuple[str | int, ...], name: str) -> None:
    for value in (*ODD, *(() if name in FREE_TEXT else WORDS), *(PATHS if name in FREE_TEXT - {"source"} else ())):
        if is_sound(at, name, value):
            continue
        write(folder, at, name, value)
        for how in (["--check"], []) if value in ("nope", -1, None) else (["--check"],):
            said = refused(["run", "box.yaml", *how], folder, "box.yaml" if name not in FREE_TEXT else "")
            assert name in said or name in FREE_TEXT, (value, said)


@pytest.mark.parametrize("at", list(SCHEMAS), ids=str)
def test_a_misspelt_key_is_told_with_the_nearest(folder: Path, at: tuple[str | int, ...]) -> None:
    for name in SCHEMAS[at].model_fields:
        if name in ("kind", "http"):  # another kind altogether, and too short to be misspelt
            continue
        write(folder, at, f"{name}s_", "x")
        said = refused(["run", "box.yaml", "--check"], folder, "box.yaml", f"{name}s_", "unknown key")
        assert "did you mean" in said


def test_a_key_that_must_stand_there_is_named(folder: Path) -> None:
    for name in ("bundle", "budget", "cameras"):
        (folder / "box.yaml").write_text(yaml.safe_dump({key: value for key, value in SOUND.items() if key != name}))
        refused(["run", "box.yaml"], folder, "box.yaml", name, "missing")
