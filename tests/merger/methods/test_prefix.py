"""`--share-prefix`: queries of one camera take the longest prefix of their donor with which they reach their target."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from gemel.merger import merge
from gemel.merger.checkpoint import Checkpoint, snapshots
from gemel.merger.context import MergeContext, Merged
from gemel.merger.methods import prefix as module
from gemel.merger.methods.prefix import find_camera_families, prove_longest, share_prefixes
from gemel.merger.methods.private import Trained
from gemel.merger.methods.registry import prepare_task
from gemel.merger.proof import Observed, Proof
from gemel.models.bundle import open_bundle
from gemel.models.errors import InputError
from gemel.models.sharing.flop_rates import flop_rates
from gemel.models.sharing.plan import SharingPlan
from gemel.models.workload import Workload, load_workload
from tests.merger.options import QUICK

OPTIONS = replace(QUICK, share_prefix=True)
LAYERS = ("stem.0", "body.0", "last.0")


def originals_of(ctx: MergeContext) -> Merged:
    return Merged(SharingPlan(), snapshots(ctx.originals))


def take_longest(task, query: str, states, merged: Merged) -> int:
    """In place of the proof, which prefixes that are not trained do not pass."""
    return max(states, default=0)


@pytest.mark.parametrize("longest", [0, 1, 2, 3])
def test_camera_prefix_is_the_longest_that_holds(
    ctx: MergeContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest: int
) -> None:
    lengths = []

    def train(task, models):
        frozen = [name for name, one in models["q2"].named_parameters() if not one.requires_grad]
        lengths.append(sum(f"{path}.weight" in frozen for path in LAYERS))
        return Trained(1.0 if lengths[-1] <= longest else 0.5, models["q2"].state_dict())

    monkeypatch.setattr(module, "train_schedules", train)
    monkeypatch.setattr(module, "prove_longest", take_longest)
    checkpoint, before = Checkpoint(tmp_path / "prefix", {}, resume=False), originals_of(ctx)
    merged = share_prefixes(ctx, before, OPTIONS, checkpoint)
    assert merged.plan.shared == tuple((("q0", path), ("q2", path)) for path in LAYERS[:longest])
    assert len(lengths) == 2
    (row,) = (row for row in checkpoint.log if "common" in row)
    assert row["common"] == longest and row["donor"] == "q0" and (row["saved_flops_per_s"] > 0) == (longest > 0)
    own, donor = merged.states["q2"], before.states["q0"]
    equal = {name.split(".")[0] for name in own if torch.equal(own[name], donor[name]) and "num_" not in name}
    assert equal == {path.split(".")[0] for path in LAYERS[:longest]}, "norms included"


def test_layer_of_a_prefix_leaves_its_set_for_the_donors(ctx: MergeContext) -> None:
    (family,) = find_camera_families(ctx, originals_of(ctx))
    plan = SharingPlan(((("q1", "stem.0"), ("q2", "stem.0")), (("q0", "last.0"), ("q2", "last.0"))))
    tied = module.tie_prefixes(plan, family, module.common_lengths(family, {"q2": 2}))
    assert set(tied.shared) == {(("q0", path), ("q2", path)) for path in LAYERS}


def test_queries_of_one_init_take_its_first_layers(
    ctx: MergeContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ancestor = {name: torch.full_like(tensor, 0.5) for name, tensor in ctx.originals["q0"].state_dict().items()}
    torch.save(ancestor, tmp_path / "init.pt")
    ctx.queries = {name: replace(query, init=tmp_path / "init.pt") for name, query in ctx.queries.items()}
    (family,) = find_camera_families(ctx, originals_of(ctx))
    assert family.donor_query is None and family.queries == ("q0", "q2")

    def train(task, models):
        ((query, model),) = models.items()
        frozen = sum(not dict(model.named_parameters())[f"{path}.weight"].requires_grad for path in LAYERS)
        return Trained(1.0 if frozen <= {"q0": 1, "q2": 2}[query] else 0.5, model.state_dict())

    monkeypatch.setattr(module, "train_schedules", train)
    monkeypatch.setattr(module, "prove_longest", take_longest)
    checkpoint = Checkpoint(tmp_path / "prefix", {}, resume=False)
    merged = share_prefixes(ctx, originals_of(ctx), OPTIONS, checkpoint)
    assert merged.plan.shared == ((("q0", "stem.0"), ("q2", "stem.0")),)
    for query, layers in (("q0", LAYERS[:1]), ("q2", LAYERS[:2])):
        assert [path for path in LAYERS if merged.states[query][f"{path}.weight"].eq(0.5).all()] == list(layers)
    saved = {row["query"]: row["saved_flops_per_s"] for row in checkpoint.log if "common" in row}
    assert saved["q2"] == 0 < saved["q0"], "the query with the longest prefix runs it"
    assert module.common_lengths(family, {"q0": 0, "q2": 2}) == {}, "a prefix of one query saves nothing"


@pytest.mark.parametrize(
    ("p_values", "shares", "longest"),
    [
        ({1: 0.001, 2: 0.004, 3: 0.02}, False, 2),
        ({1: 0.02, 2: 0.001, 3: 0.001}, False, 0),
        ({0: 0.02, 1: 0.001}, True, 0),
        ({0: 0.001, 1: 0.001}, True, 1),
    ],
)
def test_prefixes_are_accepted_up_to_the_first_unproven_one(
    ctx: MergeContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, p_values: dict[int, float], shares: bool,
    longest: int,
) -> None:  # fmt: skip
    tested = []

    def observe(query: str, model: torch.nn.Module) -> Observed:
        tested.append(round(float(model.state_dict()["stem.0.weight"].flatten()[0])))
        return Observed(0.95)

    def prove(observed: Observed, error: float) -> Proof:
        return Proof(p_values[tested[-1]] <= error, 0.96, None, error)

    monkeypatch.setattr(ctx, "observe", observe)
    monkeypatch.setattr(module, "prove_query", prove)
    before = originals_of(ctx)
    states = {length: {**before.states["q2"]} for length in p_values}
    for length, state in states.items():
        state["stem.0.weight"] = torch.full_like(state["stem.0.weight"], length)
    plan = SharingPlan(((("q1", "stem.0"), ("q2", "stem.0")),)) if shares else SharingPlan()
    merged = Merged(plan, {**before.states, "q2": states.pop(0, before.states["q2"])})
    task = prepare_task(ctx, plan, OPTIONS, Checkpoint(tmp_path / "prefix", {}, resume=False))
    assert prove_longest(task, "q2", states, merged) == longest
    assert tested == sorted(p_values)[: len(tested)], "from the shortest on"


@pytest.mark.parametrize("keys", [{"camera": "other"}, {"roi": [0, 0, 0.5, 0.5]}, {"input_size": 32}])
def test_queries_that_see_other_frames_have_no_common_prefix(workload: Workload, keys: dict) -> None:
    document = yaml.safe_load(workload.path.read_text())
    document["cameras"]["other"] = {"source": "none.mp4", "fps": 5}
    document["queries"][2].update(keys)
    workload.path.write_text(yaml.safe_dump(document))
    queries = load_workload(workload.path).queries
    assert module._camera_key(queries[0]) != module._camera_key(queries[2])


def test_merge_with_common_prefix_saves_flops_of_one_camera(workload: Workload, tmp_path: Path) -> None:
    report = merge(workload, tmp_path / "b.safetensors", options=OPTIONS)
    assert all(query.ratio >= 0.9 for query in report.queries)
    bundle = open_bundle(report.bundle, ["tests.merger.tiny:tiny_net"])
    first, third = bundle.query("q0").tensors, bundle.query("q2").tensors
    assert all(first[key] == third[key] for key in ("stem.0.weight", "stem.1.weight", "stem.1.running_var"))
    assert report.flops_with_prefix < report.flops_after and report.saved_fraction > 0
    rates = flop_rates(bundle, dict.fromkeys(("q0", "q1", "q2"), 5.0))
    assert rates.with_prefix == pytest.approx(report.flops_with_prefix) and rates.alone == report.flops_after
    rows = [json.loads(line) for line in Path(f"{report.bundle}.log.jsonl").read_text().splitlines()]
    assert [row["query"] for row in rows if "common" in row] == ["q2"]


def test_common_prefix_of_packed_weights_is_refused() -> None:
    with pytest.raises(InputError, match="share_prefix"):
        replace(OPTIONS, weights="int8")
