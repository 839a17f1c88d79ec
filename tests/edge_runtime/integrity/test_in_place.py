"""A bundle that is changed in place while a box serves it is noticed, and never served."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from edge_runtime.daemon import run
from edge_runtime.integrity.vigil import Vigil
from models.bundle import open_bundle
from tests.edge_runtime.reloading.running import Running, frames_of, write
from tests.edge_runtime.tiny import FACTORY, query, trained_looking, write_clip, write_config

CAMERAS = {"left": {"source": "left.mp4", "loop": True}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bundle of two queries, and memory for one at a time: each run loads."""
    torch.set_num_threads(1)
    write_clip(tmp_path / "left.mp4", 12)
    models = {"one": trained_looking(1), "two": trained_looking(2)}
    write(tmp_path / "tiny.safetensors", models, query("one", "left"), query("two", "left"))
    shutil.copy(tmp_path / "tiny.safetensors", tmp_path / "sound.safetensors")
    least = run(write_config(tmp_path, cameras=CAMERAS), check=True)["least_budget_bytes"]
    write_config(tmp_path, cameras=CAMERAS, budget=least)
    return tmp_path


def zeros(path: Path) -> None:
    """The tensors, zero from now on; a reader of the header sees nothing."""
    start = open_bundle(path, [FACTORY]).header.data_start
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(path.stat().st_size - start))


def cut(path: Path) -> None:
    os.truncate(path, 512)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def right_answers(folder: Path, records) -> bool:
    bundle, frames = open_bundle(folder / "sound.safetensors", [FACTORY]), frames_of(folder / "left.mp4")
    for record in records:
        asked = bundle.query(record["query"])
        batch = asked.preprocess.normalise(torch.stack([asked.preprocess.resize(frames[record["frame"] % 12])]))
        with torch.inference_mode():
            scores = bundle.build(asked.id)(batch).softmax(1)[0]
        if record["score"] != pytest.approx(float(scores.max()), rel=1e-4):
            return False
    return len(records) > 0


@pytest.mark.parametrize("change", [zeros, cut, emptied])
def test_what_is_not_in_memory_pauses_and_a_sound_file_is_served_again(folder, change):
    path = folder / "tiny.safetensors"
    with Running(folder / "box.yaml") as box:
        for name in ("one", "two"):
            box.more(name)
        change(path)

        def paused():
            return [
                row for row in box.serving.summary()["queries"] if "changed in place" in (row["last_failure"] or "")
            ]

        assert len(box.until(paused)) == 1, "the other one is in memory, and goes on"
        going = ({"one", "two"} - {paused()[0]["id"]}).pop()
        box.more(going)
        assert "changed in place" in box.serving.summary()["bundle_fault"]
        shutil.copy(folder / "sound.safetensors", path)
        box.until(lambda: box.serving.summary()["bundle_fault"] is None)
        for name in ("one", "two"):
            box.more(name)
        assert not paused()
    assert right_answers(folder, box.records()) and box.summary["balanced"]
    dropped = {row["query"]: row["dropped"] for row in box.summary["ledger"]}
    assert any("paused" in reasons for reasons in dropped.values())


def test_a_bundle_that_is_renamed_over_leaves_the_old_one_serving_until_the_reload(folder):
    with Running(folder / "box.yaml") as box:
        first = box.more("one")[0]["bundle"]
        models = {"one": trained_looking(5), "two": trained_looking(6)}
        write(folder / "tiny.safetensors", models, query("one", "left"), query("two", "left"))
        assert {one["bundle"] for one in box.more("one", 4) + box.more("two", 4)} == {first}
        assert box.serving.summary()["bundle_fault"] is None
        assert box.reload() is None
        box.until(lambda: box.of("two")[-1]["bundle"] != first)
    assert right_answers(folder, [one for one in box.records() if one["bundle"] == first])


def test_a_box_whose_bundle_was_changed_in_place_takes_up_another_one(folder):
    with Running(folder / "box.yaml") as box:
        box.more("one")
        zeros(folder / "tiny.safetensors")
        box.until(lambda: box.serving.summary()["bundle_fault"])
        reason = box.reload()
        assert reason is not None and "content hash" in reason
        shutil.copy(folder / "sound.safetensors", folder / "fresh")
        os.replace(folder / "fresh", folder / "tiny.safetensors")
        assert box.reload() is None
        assert box.serving.summary()["bundle_fault"] is None
        for name in ("one", "two"):
            box.more(name)
    assert right_answers(folder, box.records()) and box.summary["balanced"]


def test_bytes_that_change_without_a_word_are_found_by_hashing_again(folder):
    path = folder / "tiny.safetensors"
    bundle = open_bundle(path, [FACTORY])
    vigil = Vigil(bundle, bytes_per_s=1e12)
    name = bundle.names_in_order("one")[0]
    stamp = path.stat()
    with path.open("r+b") as file:
        file.seek(bundle.header.data_start + bundle.header.entries[name].begin)
        file.write(b"\1\2\3\4")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert not vigil.look().lacks(name)
    vigil.start()
    try:
        for _ in range(600):
            if vigil.trust.lacks(name):
                break
            vigil._thread.join(0.1)
        assert vigil.trust.bad == {name} and "a tensor changed in place" in (vigil.fault or "")
    finally:
        vigil.stop()
