"""The spec of an architecture is its state dict; only the zoo's specs are built once."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import nn

from models import zoo
from models.bundle.format import code_of
from models.bundle.model_spec import load_model_spec, model_spec
from models.zoo.registry import ENTRIES


def request(model: str, **others: Any) -> Any:
    entry = ENTRIES.get(model)
    size, task = (entry.input_size, entry.task) if entry else (64, "classification")
    given = {"model_args": {}, "input_size": size, "task": task, "classes": ("a", "b"), **others}
    return SimpleNamespace(model=model, **given)


def build(query: Any) -> nn.Module:
    return zoo.build(query.model, query.classes, query.model_args, query.input_size, query.task, "meta")


def test_zoo_spec_depends_on_all_arguments() -> None:
    queries = [
        request("ssd_resnet18"),
        request("ssd_resnet18", classes=("a", "b", "c")),
        request("ssd_resnet18", input_size=320),
        request("ssd_resnet18", model_args={"aspect_ratios": []}),
        request("vit_b_16", input_size=64),
        request("vit_b_16", input_size=96),
    ]
    for query in queries:
        built = build(query)
        found = load_model_spec(query, partial(build, query))
        assert found == model_spec(built)
        state = built.state_dict()
        assert found.tensors == {key: (code_of(value.dtype), tuple(value.shape)) for key, value in state.items()}


def test_user_model_spec_is_built_each_time() -> None:
    query = request("tests.edge_runtime.tiny:net")
    load_model_spec(query, partial(nn.Linear, 2, 3))
    assert load_model_spec(query, partial(nn.Linear, 2, 4)).tensors["weight"] == ("F32", (4, 2))


def test_model_spec_of_tied_tensors_names_the_first() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert model_spec(model).same == {"1.weight": "0.weight"}
