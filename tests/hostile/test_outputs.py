"""Outputs that name inputs: one line that says which, before anything is opened, and every file stays as it was.

Each file that a command writes against each that it reads: named itself where a user names the output, and through a
link or a second name of the same file (a hard link) in the place where the output goes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.hostile.harness import refused
from tests.hostile.samples import BUNDLE, CLASSIFIER, OLD, UPDATE

WORKLOAD, EVAL, BOX = "own.yaml", "own-eval.yaml", "own-box.yaml"
OF_WORKLOAD = {
    WORKLOAD: "the workload", "gate.mp4": "the source of camera gate", "frames/f.png": "the source of camera yard",
    "frames": "the source of camera yard", "weights/b.pt": "the weights of b",
    "weights/d.safetensors": "the first weights of a", "data/a/train/busy/u0__0busy.png": "the data of a",
    "data/a/test": "the data of a", "unlabelled/f.png": "the data of b", "unlabelled": "the data of b",
    "seen.mp4": "the data of c",
}  # fmt: skip
TRAINED = ("weights/d.safetensors", "data/a/test", "unlabelled", "frames")
"""Those of them that can be named where only a .safetensors file can be."""
OF_EVAL = {
    BUNDLE: "the bundle", EVAL: "the workload", "gate.mp4": "the source of camera gate",
    "weights/a.safetensors": "the weights of a", "unlabelled/f.png": "the data of b", "unlabelled": "the data of b",
}  # fmt: skip
OF_BOX = {
    BUNDLE: "the bundle", f"{BUNDLE}.profile.json": "its profile", BOX: "the config", "key.pub": "the public key",
    "gate.mp4": "the source of camera gate", "frames/f.png": "the source of camera yard",
    "frames": "the source of camera yard",
}  # fmt: skip
NAMED, LINKED = ("itself", "link", "hard link"), ("link", "hard link")


@dataclass(frozen=True)
class Output:
    """One file that a command writes: the command (`{}` stands for the name that is given), its name, what it must not
    be, and by which ways it is tried.
    """

    command: tuple[str, ...]
    name: str
    inputs: Mapping[str, str]
    ways: Sequence[str] = LINKED


OUTPUTS = {
    "merge --out": Output(("merge", WORKLOAD, "-o", "{}"), "new", OF_WORKLOAD, NAMED),
    "merge --resume": Output(("merge", WORKLOAD, "--resume", "-o", "{}"), "new", {WORKLOAD: "the workload"}, NAMED),
    "merge: its log": Output(("merge", WORKLOAD, "-o", "new"), "new.log.jsonl", OF_WORKLOAD, ["hard link"]),
    "merge: its work": Output(("merge", WORKLOAD, "-o", "new"), "new.work", OF_WORKLOAD, ["link"]),
    "train: weights": Output(("train", WORKLOAD, "--query", "a"), "weights/new.safetensors",
                             {name: OF_WORKLOAD[name] for name in TRAINED}, ["itself"]),
    "train: weights, linked": Output(("train", WORKLOAD, "--query", "a"), "weights/new.safetensors", OF_WORKLOAD,
                                     ["hard link"]),
    "eval: report.json": Output(("eval", BUNDLE, EVAL, "-o", "new"), "new/report.json", OF_EVAL),
    "eval: report.html": Output(("eval", BUNDLE, EVAL, "-o", "new"), "new/report.html", {BUNDLE: "the bundle"}),
    "bundle export --out": Output(("bundle", "export", BUNDLE, "--query", "a", "-o", "{}"), "new.onnx",
                                  {BUNDLE: "the bundle"}, NAMED),
    "bundle diff --out": Output(("bundle", "diff", OLD, BUNDLE, "-o", "{}"), "new.update",
                                {OLD: "the old bundle", BUNDLE: "the new bundle"}, NAMED),
    "bundle apply --out": Output(("bundle", "apply", OLD, UPDATE, "-o", "{}"), "new.safetensors",
                                 {OLD: "the old bundle", UPDATE: "the update"}, NAMED),
    "profile": Output(("profile", BUNDLE), f"{BUNDLE}.profile.json", {BUNDLE: "the bundle"}),
    "run: trace": Output(("run", BOX), "new.jsonl", OF_BOX, NAMED),
    "run: sinks[0].path": Output(("run", BOX), "new.jsonl", OF_BOX, ["itself", "hard link"]),
    "run: spool": Output(("run", BOX, "--check"), "spool/ledger.json", OF_BOX),
}  # fmt: skip


@pytest.fixture
def own(house: Path) -> Path:
    """The house with a box and workloads of its own: of labelled frames, a folder of frames and a video; one camera is
    such a folder, too.
    """
    (house / "frames").mkdir()
    shutil.copy(house / "data/a/train/busy/u0__0busy.png", house / "frames/f.png")
    shutil.copytree(house / "frames", house / "unlabelled")
    shutil.copy(house / "gate.mp4", house / "seen.mp4")
    cameras = {"gate": {"source": "gate.mp4", "fps": 5}, "yard": {"source": "frames", "fps": 5}}
    common = {**CLASSIFIER, "camera": "gate", "sla_ms": 10_000}
    queries = [
        {"id": "a", **common, "weights": "weights/new.safetensors", "init": "weights/d.safetensors", "data": "data/a"},
        {"id": "b", **common, "weights": "weights/b.pt", "data": "unlabelled"},
        {"id": "c", **common, "weights": "weights/a.safetensors", "data": "seen.mp4"},
    ]
    _write(house / WORKLOAD, {"name": "own", "cameras": cameras, "queries": queries})
    judged, box = (yaml.safe_load((house / name).read_text()) for name in ("workload.yaml", "box.yaml"))
    judged["queries"][1]["data"] = "unlabelled"
    _write(house / EVAL, judged)
    (house / "key.pub").touch()
    _write(house / BOX, {**box, "cameras": cameras, "public_key": "key.pub"})
    return house


def _write(path: Path, document: object) -> None:
    path.write_text(yaml.safe_dump(document))  # in place: what is linked to it stays so


@contextlib.contextmanager
def _aimed(own: Path, output: Output, name: str, how: str) -> Iterator[str]:
    """What is given as the output's name, while that is another name of an input or of a file in one."""
    place, aim = own / output.name, own / name
    if how == "itself":
        yield f"{name}/{place.name}" if aim.is_dir() else name
        return
    kept = place.with_name("kept")
    place.parent.mkdir(exist_ok=True)
    if place.exists():
        place.rename(kept)
    place.symlink_to(kept if aim == place else aim) if how == "link" else os.link(kept if aim == place else aim, place)
    try:
        yield output.name
    finally:
        place.unlink()
        if kept.exists():
            kept.rename(place)


def _give(own: Path, said: str, given: str) -> None:
    """Write the output's name into the file that names it."""
    command, _, key = said.partition(": ")
    if command == "train":
        document = yaml.safe_load((own / WORKLOAD).read_text())
        document["queries"][0]["weights"] = given
        _write(own / WORKLOAD, document)
    elif command == "run":
        document = yaml.safe_load((own / BOX).read_text())
        values = {"trace": given, "sinks": [{"kind": "jsonl", "path": given}], "spool": "spool"}
        part = key.partition("[")[0]
        _write(own / BOX, {**document, "trace": None, "sinks": [{"kind": "jsonl"}], part: values[part]})


@pytest.mark.parametrize("said", OUTPUTS)
def test_nothing_is_written_to_what_is_read(own: Path, said: str) -> None:
    output = OUTPUTS[said]
    for name, what in output.inputs.items():
        for how in output.ways:
            if how == "hard link" and (own / name).is_dir():
                continue
            with _aimed(own, output, name, how) as given:
                _give(own, said, given)
                line = refused([part.format(given) for part in output.command], own, what)
                assert line.endswith("; name a file that is nothing else"), (name, how)


def test_a_trace_and_a_sink_are_two_files(own: Path) -> None:
    document = yaml.safe_load((own / BOX).read_text())
    _write(own / BOX, {**document, "trace": "new.jsonl", "sinks": [{"kind": "jsonl", "path": "./new.jsonl"}]})
    refused(["run", BOX], own, f"{BOX}: sinks[0].path: ", "is what 'trace' names")


def test_two_queries_that_are_trained_have_a_file_each(own: Path) -> None:
    document = yaml.safe_load((own / "merge.yaml").read_text())
    for query in document["queries"]:
        query["weights"] = "new.safetensors"
    _write(own / "merge.yaml", document)
    refused(["train", "merge.yaml"], own, "merge.yaml: weights: ", "is what 'weights' names")


def test_a_demo_goes_into_no_folder_that_holds_anything_else(house: Path) -> None:
    refused(["demo", "--out", "."], house, "holds other files")
    (house / "data" / "demo.json").write_text(json.dumps({"other": 1}))
    refused(["demo", "--out", "data"], house, "holds a demo of another seed")
