"""What a merge keeps on the device: counted on the meta device, which has every byte but the values."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from merger import checkpoint as states
from merger.checkpoint import snapshot, snapshots
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.distributed import ProcessGroup
from merger.start.solving import _best_weight, _Equations
from models.sharing.groups import groups
from models.sharing.layers import layers_of_all
from models.sharing.plan import SharingPlan, tie
from models.workload import load_workload
from models.zoo import build_query

META = torch.device("meta")
HIGH_6 = Path(__file__).parents[3] / "benchmarks" / "workloads" / "high-6.yaml"


def on_device() -> int:
    """Bytes of all tensors that lie on the meta device, each memory once."""
    gc.collect()
    there = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter) and one.device == META]
    there += [one.grad for one in there if one.is_leaf and one.grad is not None]
    memory = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in there}
    return sum(memory.values())


@pytest.mark.exhaustive
def test_a_merge_of_twelve_models_keeps_its_originals_what_is_trained_and_its_moments_there(monkeypatch) -> None:
    monkeypatch.setattr(states, "_kept", lambda tensor: torch.empty_like(tensor, device="cpu"))  # never written to
    before = on_device()
    workload = load_workload(HIGH_6)
    originals = {query.id: build_query(query, device="meta") for query in workload.queries}
    total = on_device() - before
    assert total > 10**9
    plan = SharingPlan.of(groups(layers_of_all(workload.queries), "wide"))
    ctx = SimpleNamespace(originals=originals, seed=0, group=ProcessGroup())
    start = snapshots(originals)
    assert on_device() - before == total, "the states to begin with lie elsewhere"
    models = MergeContext.models(ctx, originals, None, plan)  # type: ignore[arg-type]
    tie(models, plan)
    trained = {id(one): one for model in models.values() for one in model.parameters()}
    shared = sum(one.nbytes for one in trained.values())
    optimiser = torch.optim.AdamW(trained.values(), foreach=False, fused=False)
    for one in trained.values():
        one.grad = torch.empty_like(one)
        optimiser.state[one] = {"exp_avg": torch.empty_like(one), "exp_avg_sq": torch.empty_like(one)}
    best, now = Merged(plan, snapshots(models)), Merged(plan, snapshots(models))
    kept = on_device() - before
    assert 4 * shared < kept <= 2 * total + 4 * shared and kept < 1.1 * (total + 4 * shared)
    assert best.states.keys() == now.states.keys() == start.keys()


def test_a_snapshot_is_a_copy_of_every_tensor_as_it_lies() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)  # type: ignore
    found = snapshot(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor) and found[name].stride() == tensor.stride()
        assert found[name].data_ptr() != tensor.data_ptr() and not found[name].requires_grad


def test_what_is_solved_on_a_card_begins_and_ends_in_the_processors_memory() -> None:
    with FakeTensorMode():
        assert states._kept(torch.empty(3, device="cuda")).device.type == "cpu"
        equations = _Equations(centre=True)
        for _ in range(2):
            equations.add(torch.empty(20, 6, device="cuda"), torch.empty(20, 4, device="cuda"))
        weight = _best_weight([equations, equations], torch.empty(4, 6, 1, 1))
        assert weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.shape == (4, 6)
        assert equations.bias(weight).device.type == "cpu"
