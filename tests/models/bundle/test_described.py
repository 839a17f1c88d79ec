"""What is remembered of an architecture is that architecture, and nobody else's model is remembered."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from models import io as memory
from models import zoo
from models.bundle.format import code_of
from models.bundle.model_spec import ModelSpec, load_model_spec, model_spec
from models.zoo.registry import ENTRIES, register
from tests.exhaustive import every

FEW = ["resnet18", "ssd_resnet18", "vit_b_16", "mobilenet_v3_small"]


@pytest.fixture(autouse=True)
def empty_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is remembered yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(memory, "_HELD", {})


def asked(model: str, classes: int = 2, **others: Any) -> Any:
    entry = ENTRIES.get(model)
    size, task = (entry.input_size, entry.task) if entry else (64, "classification")
    given = {"model_args": {}, "input_size": size, "task": task, **others}
    return SimpleNamespace(model=model, classes=tuple(map(str, range(classes))), **given)


def build(query: Any) -> nn.Module:
    return zoo.build(query.model, query.classes, query.model_args, query.input_size, query.task, "meta")


def never() -> nn.Module:
    raise AssertionError("is built though it is remembered")


@pytest.mark.parametrize("model", every(zoo.names(), FEW))
def test_what_is_remembered_of_a_zoo_model_is_what_is_built(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query = asked(model)
    load_model_spec(query, partial(build, query))
    monkeypatch.setattr(memory, "_HELD", {})
    found, built = load_model_spec(query, never), build(query)
    assert found == model_spec(built)
    state = built.state_dict()
    assert found.tensors == {key: (code_of(value.dtype), tuple(value.shape)) for key, value in state.items()}
    layers = {path: one for path, one in built.named_modules() if type(one) in (nn.Conv2d, nn.Linear)}
    assert found.layers == {path: getattr(one, "groups", 1) for path, one in layers.items()}


def test_everything_that_changes_an_architecture_is_asked_for() -> None:
    queries = [
        asked("ssd_resnet18"),
        asked("ssd_resnet18", classes=3),
        asked("ssd_resnet18", input_size=320),
        asked("ssd_resnet18", model_args={"aspect_ratios": []}),
        asked("resnet18"),
        asked("resnet18", model_args={"low_rank": {"layer4.0.conv1": 4}}),
        asked("vit_b_16", input_size=64),
        asked("vit_b_16", input_size=96),
    ]
    for query in queries:
        assert load_model_spec(query, partial(build, query)) == model_spec(build(query))


def test_ones_own_models_are_built_each_time() -> None:
    query = asked("tests.edge_runtime.tiny:net")
    load_model_spec(query, partial(nn.Linear, 2, 3))
    assert load_model_spec(query, partial(nn.Linear, 2, 4)).tensors["weight"] == ("F32", (4, 2))


def test_what_others_entered_into_the_zoo_is_built_each_time() -> None:
    register("somebodys", task="classification")(lambda num_classes, input_size: nn.Linear(2, num_classes))
    try:
        query = asked("somebodys")
        load_model_spec(query, partial(build, query))
        ENTRIES.pop("somebodys")
        register("somebodys", task="classification")(lambda num_classes, input_size: nn.Linear(5, num_classes))
        assert load_model_spec(query, partial(build, query)).tensors["weight"] == ("F32", (2, 5))
    finally:
        ENTRIES.pop("somebodys")


def test_tied_tensors_are_one() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    found = model_spec(model)
    assert found.same == {"1.weight": "0.weight"}
    assert ModelSpec.from_json(json.loads(json.dumps(found.to_json()))) == found
