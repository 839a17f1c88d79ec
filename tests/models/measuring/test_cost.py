"""Operations and workspace of every model of the zoo, found without allocating anything."""

from __future__ import annotations

import pytest
import torch

from models import zoo
from models.cost import flops, workspace_bytes
from models.zoo.registry import ENTRIES
from tests.exhaustive import one_in

torch.set_num_threads(1)


@pytest.mark.parametrize("name", one_in(5, zoo.names()))
def test_every_model_of_the_zoo_is_measured_at_its_published_size(name):
    entry = ENTRIES[name]
    model = zoo.build(name, ("a", "b"), {}, entry.input_size, entry.task, device="meta")
    once, many = (workspace_bytes(model, entry.input_size, batch) for batch in (1, 2))
    assert flops(model, entry.input_size) > 1e6
    assert 1.5 * once < many < 2.5 * once
