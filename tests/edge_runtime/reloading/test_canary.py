"""A reload tries new weights on the last frames: a query that would answer otherwise keeps its old ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from edge_runtime.reload import canary_queries
from edge_runtime.samples import DRIFT_FILE
from models.bundle import open_bundle, verify_bundle
from models.evaluation import BELOW, MIN_COMPARED_FRAMES
from tests.edge_runtime.reloading.running import Running, write
from tests.edge_runtime.tiny import FACTORY, query, trained_looking, write_clip, write_config

QUERIES = (query("gate", "left"), query("yard", "left"))
CAMERAS = {"left": {"source": "left.mp4", "loop": True}}


def otherwise(model: nn.Sequential) -> nn.Sequential:
    """A model that never answers as this one does."""
    with torch.no_grad():
        model[-1].weight.neg_()  # type: ignore[operator,union-attr]
        model[-1].bias.neg_()  # type: ignore[operator,union-attr]
    return model


def a_little(model: nn.Sequential) -> nn.Sequential:
    """A model with other weights that answers as this one does."""
    with torch.no_grad():
        model[0].weight.mul_(1.0001)  # type: ignore[operator,union-attr]
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    write_clip(tmp_path / "left.mp4", 12)
    write(tmp_path / "tiny.safetensors", {"gate": trained_looking(1), "yard": trained_looking(2)}, *QUERIES)
    return tmp_path


def config(folder: Path, **keys) -> Path:
    return write_config(folder, cameras=CAMERAS, spool={"path": "spool", "every_s": 0.01}, **keys)


def reload_changed(box: Running, folder: Path, samples: int = MIN_COMPARED_FRAMES + 5) -> dict[str, str]:
    """What is held back of a bundle in which `gate` answers otherwise and `yard` does not, once there are so many
    samples of each query.
    """
    box.until(lambda: all(len(list(folder.glob(f"spool/samples/*-{one.id}-*.png"))) >= samples for one in QUERIES))
    fresh = {"gate": otherwise(trained_looking(1)), "yard": a_little(trained_looking(2))}
    write(folder / "tiny.safetensors", fresh, *QUERIES)
    assert box.reload() is None
    for one in QUERIES:
        box.more(one.id)
    return box.serving.summary()["held_back"]


def test_canary_holds_back_a_changed_query(folder):
    old = open_bundle(folder / "tiny.safetensors", [FACTORY])
    with Running(config(folder)) as box:
        held = reload_changed(box, folder)
        served = Path(box.serving.summary()["bundle"])
        assert box.records()[-1]["bundle"] == open_bundle(served).digest[:12]
    assert list(held) == ["gate"] and "by 0.00, its target is 0.95" in held["gate"]
    new, mixed = open_bundle(folder / "tiny.safetensors", [FACTORY]), open_bundle(served, [FACTORY])
    assert served.parent == folder / "spool" / "samples" and verify_bundle(served, [FACTORY]) == []
    assert mixed.query("gate").tensors == old.query("gate").tensors
    assert mixed.query("yard").tensors == new.query("yard").tensors != old.query("yard").tensors
    assert box.summary["balanced"] and box.summary["reloads"] == {"applied": 1, "refused": 0}


def test_canary_tries_again_on_the_next_reload(folder):
    with Running(config(folder)) as box:
        reload_changed(box, folder)
        first = Path(box.serving.summary()["bundle"])
        digits = open_bundle(first).digest[:12]
        enough = MIN_COMPARED_FRAMES + 5
        box.until(lambda: sum(one["bundle"] == digits for one in box.of("gate")) > enough)
        samples = len(list(folder.glob("spool/samples/*-gate-*.png")))
        box.until(lambda: len(list(folder.glob("spool/samples/*-gate-*.png"))) > samples)
        assert box.reload() is None
        assert list(box.serving.summary()["held_back"]) == ["gate"]
        assert Path(box.serving.summary()["bundle"]) != first, "what serves is not written over"


def test_canary_off_applies_everything(folder):
    with Running(config(folder, canary=False)) as box:
        assert reload_changed(box, folder) == {}
        assert Path(box.serving.summary()["bundle"]) == folder / "tiny.safetensors"


def test_canary_with_few_samples_holds_nothing_back(folder):
    with Running(write_config(folder, cameras=CAMERAS, spool={"path": "spool"})) as box:
        assert reload_changed(box, folder, samples=1) == {}


def test_canary_skips_drifted_queries(folder):
    found = {"frames": 50, "ratio": 0.5, "ci95": [0.4, 0.6], "target": 0.95, "verdict": BELOW, "reverted": True}
    digits = open_bundle(folder / "tiny.safetensors").digest[:12]
    with Running(config(folder)) as box:
        check = {"format": 1, "checked_at": 1.7e9, "bundle": digits, "queries": [{"id": "gate", **found}]}
        (folder / "spool" / DRIFT_FILE).write_text(json.dumps(check))
        assert reload_changed(box, folder) == {}


@pytest.mark.parametrize(("changes", "tried"), [
    ({}, True), ({"camera": "right"}, False), ({"classes": ("x", "y", "z")}, False), ({"roi": (0, 0, 9, 9)}, False),
    ({"sla_ms": 5.0}, True),
], ids=str)  # fmt: skip
def test_canary_skips_queries_with_another_question(tmp_path, changes, tried):
    names = ("old.safetensors", "new.safetensors")
    write(tmp_path / names[0], {"gate": trained_looking(1)}, query("gate", "left"))
    write(tmp_path / names[1], {"gate": trained_looking(2), "new": trained_looking(3)},
          query("gate", **{"camera": "left", **changes}), query("new", "left"))  # fmt: skip
    old, new = (open_bundle(tmp_path / name, [FACTORY]) for name in names)
    assert [one.id for one in canary_queries(old, new, ())] == (["gate"] if tried else [])
    assert canary_queries(old, new, {"gate"}) == [] and canary_queries(old, old, ()) == []
