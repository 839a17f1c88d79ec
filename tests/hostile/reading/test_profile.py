"""BUNDLE.profile.json that means harm: one line that names it, whatever reads it, and a box that runs all the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.scheduler.costs import BatchCost
from edge_runtime.simulation.profile_io import (
    MeasuredProfile,
    QueryProfile,
    describe_machine,
    measured_costs,
    read_profile,
)
from edge_runtime.simulation.profile_io import write_profile as write
from models.bundle import Bundle, open_bundle
from models.errors import InputError
from tests.edge_runtime.tiny import FACTORY, tiny_bundle, write_clip, write_config, write_folder
from tests.hostile.damages import damages
from tests.hostile.harness import refused, tried
from tests.hostile.reading.test_json import FILES, make_special

NAME = "tiny.safetensors.profile.json"
PLAN = ["plan", "tiny.safetensors", "--factory", FACTORY]
READ_BY = {
    "plan": PLAN,
    "plan --device measured": [*PLAN, "--device", "measured"],
    "simulate": ["simulate", *PLAN[1:], "--duration", "1"],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny bundle, its profile and a box."""
    folder = tmp_path_factory.mktemp("measured")
    bundle = tiny_bundle(folder / "tiny.safetensors")
    batches = (BatchCost(1, 0.01, 1000), BatchCost(2, 0.012, 2000))
    queries = {query.id: QueryProfile(0.002, batches) for query in bundle.queries}
    write(bundle.path, MeasuredProfile(bundle.digest, describe_machine("cpu"), "cpu", "torch", 3e9, 1e-4, queries))
    write_clip(folder / "left.mp4", 4)
    write_folder(folder / "right", 4)
    write_config(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "box")


def _document(folder: Path) -> dict[str, Any]:
    return json.loads((folder / NAME).read_text())


def _batches(change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[dict[str, Any]], None]:
    def changed(document: dict[str, Any]) -> None:
        query = document["queries"]["gate"]
        query["batches"] = change(query["batches"])

    return changed


def _set(**keys: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.update(keys)


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no batches": _batches(lambda batches: []),
    "no batch of one": _batches(lambda batches: batches[1:]),
    "a batch twice": _batches(lambda batches: [batches[0], *batches]),
    "batches the other way round": _batches(lambda batches: batches[::-1]),
    "1e9 frames at once": _batches(lambda batches: [*batches, {**batches[0], "count": 10**9}]),
    "many batches": _batches(lambda batches: [{**batches[0], "count": count} for count in range(1, 3000)]),
    "a run of no time": _batches(lambda batches: [{**batches[0], "run_s": 0}]),
    "a run of less than no time": _batches(lambda batches: [{**batches[0], "run_s": -1.0}]),
    "a run in words": _batches(lambda batches: [{**batches[0], "run_s": "0.01"}]),
    "a run for ever": _batches(lambda batches: [{**batches[0], "run_s": 1e300}]),
    "negative memory": _batches(lambda batches: [{**batches[0], "workspace_bytes": -1}]),
    "all the memory there is": _batches(lambda batches: [{**batches[0], "workspace_bytes": 10**18}]),
    "no queries": _set(queries={}),
    "a query too many": lambda document: document["queries"].update(other=document["queries"]["gate"]),
    "a query too few": lambda document: document["queries"].pop("gate"),
    "a query with a long name": lambda document: document["queries"].update({"x" * 10**6: 1}),
    "another bundle": _set(digest="0" * 64),
    "another format": _set(profile=2),
    "a format that is a truth": _set(profile=True),
    "copies at no rate": _set(copy_bytes_per_s=0),
    "copies at a rate below": _set(copy_bytes_per_s=-1e9),
    "a machine without a name": _set(machine={}),
    "a machine of lists": _set(machine={"name": [["x"]]}),
    "a machine in a machine": _set(machine={"name": "x", "cores": {"a": 1}}),
    "a device of nobody": _set(device="tpu"),
    "nothing": lambda document: document.clear(),
}
TEXTS = {
    "empty": "",
    "garbage": "\x00\x01",
    "a list": "[]",
    "null": "null",
    "deep": '{"profile": ' + "[" * 100_000,
    "not a number": '{"profile": NaN}',
    "a key twice": '{"profile": 1, "profile": 1}',
    "torn": '{"profile": 1, "digest": "0',
}


def _damage(folder: Path, what: str) -> None:
    path = folder / NAME
    if what in FILES:
        path.unlink()
        make_special(path, what)
    elif what in TEXTS:
        path.write_text(TEXTS[what])
    else:
        document = _document(folder)
        DAMAGES[what](document)
        path.write_text(json.dumps(document))


@pytest.mark.parametrize("what", [*DAMAGES, *TEXTS])
def test_a_damaged_profile_is_one_line(folder: Path, what: str) -> None:
    _damage(folder, what)
    bundle = open_bundle(folder / "tiny.safetensors", [FACTORY])
    with pytest.raises(InputError) as refusal:
        read_profile(bundle)
    said = str(refusal.value)
    assert said.startswith(f"{folder / NAME}: ") and said.endswith("; run `gemel profile BUNDLE` here")
    assert len(said) < 500 and said.isprintable()


@pytest.mark.parametrize(
    "what", ["many batches", "a query with a long name", "deep", "/dev/zero", "directory", "large"]
)
def test_a_damaged_profile_takes_no_time_and_no_memory(folder: Path, what: str) -> None:
    _damage(folder, what)
    refused(PLAN, folder, NAME)


@pytest.mark.parametrize("command", READ_BY.values(), ids=READ_BY)
@pytest.mark.parametrize("what", ["1e9 frames at once", "fifo"])
def test_whoever_reads_a_damaged_profile_says_so(folder: Path, what: str, command: list[str]) -> None:
    _damage(folder, what)
    refused(command, folder, NAME)


@pytest.mark.parametrize("what", ["a run in words", "deep", "fifo", "/dev/zero"])
def test_a_box_says_so_in_one_line_and_runs_without_it(folder: Path, what: str) -> None:
    _damage(folder, what)
    seen = tried(["run", "box.yaml", "--check"], folder).held()
    assert seen.code == 0 and seen.changed == () and seen.err.count(NAME) == 1


def test_whatever_place_of_a_profile_is_damaged_it_is_refused_or_gives_costs(folder: Path) -> None:
    bundle: Bundle = open_bundle(folder / "tiny.safetensors", [FACTORY])
    document = _document(folder)
    one = {"load_s": 0, "batches": [{"count": 1, "run_s": 0.1, "workspace_bytes": 0}]}
    document["queries"] = dict.fromkeys(document["queries"], one)
    outcomes = {"refused": 0, "read": 0}
    for what, damaged in damages(document):
        (folder / NAME).write_text(json.dumps(damaged))
        try:
            assert measured_costs(bundle, read_profile(bundle)).queries.keys() == {"gate", "yard", "road"}, what
            outcomes["read"] += 1
        except InputError as error:
            assert str(error).startswith(f"{folder / NAME}: ") and len(str(error)) < 1000, what
            outcomes["refused"] += 1
    assert outcomes["refused"] > 400 and outcomes["read"] > 20
