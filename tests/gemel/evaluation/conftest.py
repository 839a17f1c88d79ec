"""A bundle and its workload, small enough to be judged in a second."""

import pytest
import torch

from models.bundle import BundleQuery, Made, write_bundle
from models.sharing.groups import ceiling_bytes, groups
from models.sharing.layers import layers_of_all
from models.sharing.plan import SharingPlan, tie
from models.weights import save_weights
from models.workload import load_workload
from models.zoo import build


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, write_tiny):
    """A workload of two small classifiers with random weights, and a bundle in which they share half of them."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("tiny")
    workload = load_workload(write_tiny(root))
    (root / "weights").mkdir()
    models = {}
    for query in workload.queries:
        model = build(query.model, query.classes, query.model_args, query.input_size, query.task)
        save_weights(root / "weights" / f"{query.id}.safetensors", model.state_dict())
        models[query.id] = model
    layers = layers_of_all(workload.queries)
    tie(models, SharingPlan.of(groups(layers)[:4]))
    records = [BundleQuery.of(query) for query in workload.queries]
    write_bundle(root / "tiny.safetensors", models, records, Made("tiny", "gemel", ceiling_bytes(layers)))
    return root
