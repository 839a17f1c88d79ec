"""Mainstream: a frozen prefix from a common donor, as long as each query reaches its target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from merger import merge
from merger.checkpoint import Checkpoint
from merger.context import MergeContext
from merger.methods.mainstream import Family, Prefix, find_families, freeze_prefix, mainstream
from merger.training.recipe import Recipe
from models.bundle import open_bundle
from models.workload import Workload, load_workload
from tests.merger.options import QUICK
from tests.merger.tiny import weights_of


def test_family_is_one_architecture_before_the_head(ctx: MergeContext) -> None:
    (family,) = find_families(ctx)
    assert family.queries == ("q0", "q2") and family.donor_query == "q0"
    assert family.paths == ("stem.0", "body.0", "last.0") and family.end == "head"


def test_prefix_holds_all_before_the_next_layer(ctx: MergeContext) -> None:
    (family,) = find_families(ctx)
    names = list(ctx.originals["q2"].state_dict())
    assert family.prefix(names, 0) == []
    assert {name.split(".")[0] for name in family.prefix(names, 1)} == {"stem"}
    assert {"stem.1.running_mean", "body.1.weight"} <= set(family.prefix(names, 2))
    assert set(names) - set(family.prefix(names, 3)) == {"head.weight", "head.bias"}


def test_training_after_a_prefix_leaves_it_unchanged(ctx: MergeContext) -> None:
    (family,) = find_families(ctx)
    model = freeze_prefix(ctx, family, "q2", 2)
    ctx.training({"q2": model}, Recipe(rate=1e-2, epochs=1)).epoch()
    state, donor, own = model.state_dict(), family.donor, ctx.originals["q2"].state_dict()
    prefix = family.prefix(state, 2)
    assert prefix and all(torch.equal(state[name], donor[name]) for name in prefix)
    assert not torch.equal(state["last.0.weight"], own["last.0.weight"])
    assert not torch.equal(state["last.1.running_mean"], own["last.1.running_mean"])


def test_donor_is_the_init_that_all_name(workload: Workload, tmp_path: Path) -> None:
    path = workload.path
    ancestor = load_file(weights_of(workload, "q2"))
    document = yaml.safe_load(path.read_text())
    for query in document["queries"]:
        query["init"] = "weights/q2.safetensors"
    path.write_text(yaml.safe_dump(document))
    (family,) = find_families(MergeContext(load_workload(path)))
    assert family.donor_query is None and torch.equal(family.donor["stem.0.weight"], ancestor["stem.0.weight"])


@pytest.mark.parametrize("longest", [0, 1, 2, 3])
def test_bisection_finds_the_longest_prefix_that_holds(
    ctx: MergeContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest: int
) -> None:
    import merger.methods.mainstream as module

    tried = []

    def train_prefix(ctx: MergeContext, checkpoint: Checkpoint, family: Family, query: str, length: int, *_) -> Prefix:
        tried.append(length)
        held = length <= longest
        return Prefix(length, 1.0 if held else 0.5, family.donor if held else None)

    monkeypatch.setattr(module, "_train_after_prefix", train_prefix)
    merged = mainstream(ctx, QUICK, Checkpoint(tmp_path / "flops", {}, resume=False))
    assert [len(members) for members in merged.plan.shared] == [2] * longest
    assert len(tried) == 2 and len(set(tried)) == 2


def test_mainstream_merge_shares_the_prefix_bit_by_bit(workload: Workload, tmp_path: Path) -> None:
    report = merge(workload, tmp_path / "b.safetensors", "mainstream", options=QUICK)
    assert report.saved_fraction > 0 and all(query.ratio >= 0.9 for query in report.queries)
    bundle = open_bundle(report.bundle, ["tests.merger.tiny:tiny_net"])
    first, third = bundle.query("q0").tensors, bundle.query("q2").tensors
    same = [name for name in first if first[name] == third[name] and "num_batches" not in name]
    assert "stem.0.weight" in same and "stem.1.running_mean" in same and "head.weight" not in same
    original = load_file(weights_of(workload, "q0"))
    assert torch.equal(bundle.build("q2").state_dict()["stem.0.weight"], original["stem.0.weight"])
