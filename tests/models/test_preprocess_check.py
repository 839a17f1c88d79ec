"""The check of a query's preprocessing: a wrong order of channels and scale are found, a right one is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemel.models.data import load_split
from gemel.models.files.weights import load_weights
from gemel.models.preprocess_check import describe_preprocess_problem, find_better_preprocess, score_original
from gemel.models.workload import load_workload
from gemel.models.zoo import build_query
from tests.models.colours import write_colours

PLAIN: dict[str, Any] = {"mean": [0, 0, 0], "std": [1, 1, 1]}


class Thresholded(nn.Module):
    """A classifier of frames in BGR from 0 to 255: red where red exceeds blue, unless no value exceeds 10."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, S, S) -> (N, 2)."""
        means = x.mean(dim=(2, 3)) * self.scale
        red = (means[:, 2] - means[:, 0]) * (means.amax(dim=1) > 10)
        return torch.stack([-red, red], dim=1)


def read_query(folder, **keys):
    workload = load_workload(write_colours(folder, **keys))
    query = workload.query("a")
    return query, load_weights(query, build_query(query)).eval(), load_split(query, "val")


def test_wrong_channels_are_found(tmp_path) -> None:
    query, model, val = read_query(tmp_path, preprocess={**PLAIN, "channels": "bgr"})
    better = find_better_preprocess(query, model, val)
    assert better is not None and better.keys == {"channels": "rgb"}
    assert (better.current, better.reached) == (0.0, 1.0)
    assert describe_preprocess_problem(query, model, val, score_original(query, model, val)) == (
        "its original reaches 0.00 balanced_accuracy on 24 frames of val, and 1.00 with `preprocess: {channels: rgb}`",
        "write that into the query if it was trained so",
    )


def test_two_wrong_keys_are_found_one_after_the_other(tmp_path) -> None:
    query, _, val = read_query(tmp_path, preprocess={**PLAIN, "channels": "rgb"})
    better = find_better_preprocess(query, Thresholded().eval(), val)
    assert better is not None and better.keys == {"channels": "bgr", "scale": 255}


@pytest.mark.parametrize("labelled", [True, False])
def test_a_right_preprocess_is_left_alone(tmp_path, labelled: bool) -> None:
    query, model, val = read_query(tmp_path, preprocess=PLAIN)
    reached = score_original(query, model, val)
    assert reached == 1.0
    if not labelled:
        object.__setattr__(val, "labels", None)
    assert describe_preprocess_problem(query, model, val, reached) == ("", "")


def test_an_untrained_original_is_called_weak(tmp_path) -> None:
    query, model, val = read_query(tmp_path)
    with torch.no_grad():
        model.conv.weight.zero_()  # type: ignore[operator,union-attr]
    text, remedy = describe_preprocess_problem(query, model, val, score_original(query, model, val))
    assert text == "its original reaches only 0.50 balanced_accuracy on val, which is no evidence"
    assert remedy.startswith("train it longer")
