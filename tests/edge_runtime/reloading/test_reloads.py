"""A running box takes up what is right, whole, and nothing of what is wrong."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.edge_runtime.reloading.running import Running, wider, write
from tests.edge_runtime.tiny import query, trained_looking, write_clip, write_config, write_folder

CAMERAS = {"left": {"source": "left.mp4", "loop": True}, "right": {"source": "right", "fps": 12, "loop": True}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    write_clip(tmp_path / "left.mp4", 12)
    write_folder(tmp_path / "right", 10)
    models = {"gate": trained_looking(1), "yard": trained_looking(2)}
    write(tmp_path / "tiny.safetensors", models, query("gate", "left"), query("yard", "right"))
    write_config(tmp_path, cameras=CAMERAS)
    return tmp_path


def no_key_twice(records) -> bool:
    keys = Counter((record["run"], record["query"], record["frame"]) for record in records)
    return bool(keys) and max(keys.values()) == 1


def test_a_new_bundle_serves_from_one_frame_to_the_next_and_its_results_say_so(folder):
    with Running(folder / "box.yaml") as box:
        first = box.more("gate")[0]["bundle"]
        models = {"gate": trained_looking(1), "yard": wider(3), "new": trained_looking(4)}
        queries = [query("gate", "left"), query("yard", "right", model_args={"width": 20}), query("new", "left")]
        write(folder / "tiny.safetensors", models, *queries)
        assert box.reload() is None
        second = box.serving.summary()["digest"][:12]
        assert second != first
        for name in ("gate", "yard", "new"):
            box.until(lambda name=name: [one for one in box.of(name) if one["bundle"] == second])
        moved = box.serving.summary()["bytes_moved"]
    records = box.records()
    assert [one["bundle"] for one in records] == sorted((one["bundle"] for one in records), key=[first, second].index)
    assert no_key_twice(records) and {one["run"] for one in records} == {box.summary["run"]}
    assert box.summary["balanced"] and box.summary["reloads"] == {"applied": 1, "refused": 0}
    assert not box.summary["fault"] and [row["query"] for row in box.summary["ledger"]] == ["gate", "yard", "new"]
    assert moved
