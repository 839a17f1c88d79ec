"""A small classifier whose weights the tests save in every way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from gemel.models.workload import Query
from tests.models.queries import make_query


class Small(nn.Module):
    """A backbone of two layers and a head."""

    def __init__(self, classes: int = 2, width: int = 4) -> None:
        super().__init__()
        features = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width))
        self.backbone = nn.Sequential(OrderedDict(features=features))
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.backbone(x).mean((2, 3)))


def query_of(weights: Path | None) -> Query:
    """The query of a Small with these weights."""
    return make_query(model="small", weights=weights, classes=("car", "none"))


def equal_states(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether two states have the same names and values."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
