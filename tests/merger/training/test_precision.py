"""The precision is measured once, kept, and obeyed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import merger.merging as merging_module
import merger.training.precision as precision_module
from merger import MergeOptions, merge
from merger.checkpoint import snapshot
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.training.precision import AGREES, Precisions, apart, autocast, by_rule, measured, multiplying
from models.bundle import Trained, open_bundle
from models.errors import InputError
from models.sharing.plan import SharingPlan
from models.workload import Workload
from models.zoo import build_query
from tests.merger.options import QUICK
from tests.merger.surely import must_train


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Dictated seconds in place of a clock."""
    seconds = {"fp32": 2.0, "bf16": 1.0}
    monkeypatch.setattr(precision_module, "measured", lambda model, images: dict(seconds))
    return seconds


def _images() -> Tensor:
    return torch.rand(2, 3, 24, 24)


@pytest.mark.parametrize(("bf16", "chosen"), [(1.0, "bf16"), (1.99, "fp32"), (3.0, "fp32")])
def test_bf16_is_taken_where_it_is_clearly_faster(
    workload: Workload, timed: dict[str, float], bf16: float, chosen: str
) -> None:
    timed["bf16"] = bf16
    assert Precisions("auto", {}).of(workload.queries[0], nn.Identity(), _images) == chosen


@pytest.mark.parametrize(
    ("lost", "chosen"), [({}, "bf16"), ({"bf16": 0.5}, "tf32"), ({"bf16": 0.5, "tf32": math.nan}, "fp32")]
)
def test_what_is_faster_is_taken_where_little_is_lost(
    workload: Workload, timed: dict[str, float], monkeypatch: pytest.MonkeyPatch, lost: dict[str, float], chosen: str
) -> None:
    timed["tf32"] = 1.5
    monkeypatch.setattr(precision_module, "apart", lambda query, model, images, precision: lost.get(precision, 1e-4))
    assert Precisions("auto", {}).of(workload.queries[0], nn.Identity(), _images) == chosen


@pytest.mark.parametrize(("offset", "agrees"), [(0.0, True), (3000.0, False)])
def test_what_is_lost_shows_in_what_goes_into_the_heads(workload: Workload, offset: float, agrees: bool) -> None:
    query = workload.queries[0]
    model = build_query(query).eval()
    model.last[1].bias.data.fill_(offset)  # type: ignore[index]
    assert (apart(query, model, _images(), "bf16") <= AGREES) == agrees
    assert apart(query, model, _images(), "fp32") == 0


def test_products_on_a_card_are_in_tf32_only_where_that_was_chosen() -> None:
    card, backends = torch.device("cuda"), (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [backend.allow_tf32 for backend in backends]
    for precision, allowed in (("tf32", True), ("fp32", False), ("bf16", False)):
        with multiplying(precision, card):
            assert {backend.allow_tf32 for backend in backends} == {allowed}
    with multiplying("tf32", torch.device("cpu")):
        assert [backend.allow_tf32 for backend in backends] == before
    assert [backend.allow_tf32 for backend in backends] == before


def test_an_architecture_is_measured_once_and_the_choice_is_kept(workload: Workload, timed: dict[str, float]) -> None:
    known, told = {}, []

    def progress(event: str, **fields: Any) -> None:
        told.append((event, fields["chosen"]))

    precisions = Precisions("auto", known, progress)
    first, extra, third = workload.queries
    assert [precisions.of(query, nn.Identity(), _images) for query in (first, third, extra)] == ["bf16"] * 3
    assert told == [("precision", "bf16")] * 2 and len(known) == 2
    timed["bf16"] = 9.0
    assert Precisions("auto", known).of(first, nn.Identity(), lambda: pytest.fail("measured again")) == "bf16"


def test_a_precision_that_is_asked_for_is_not_measured(workload: Workload) -> None:
    never = lambda: pytest.fail("measured")  # noqa: E731
    assert Precisions("bf16", {}).of(workload.queries[0], nn.Identity(), never) == "bf16"


def _bf16_kernels(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: there)


def test_nothing_is_timed_where_a_processor_has_no_kernels_of_bf16(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    _bf16_kernels(monkeypatch, False)
    monkeypatch.setattr(precision_module, "_timed", lambda *_: pytest.fail("timed"))
    told: list[dict[str, object]] = []
    precisions = Precisions("auto", {}, lambda event, **fields: told.append({"event": event, **fields}))
    assert precisions.of(workload.queries[0], nn.Linear(4, 2), lambda: torch.rand(4, 4)) == "fp32"
    assert [(row["chosen"], "fp32" in row, "bf16" in row) for row in told] == [("fp32", False, False)]


def test_measuring_runs_the_model_both_ways_and_leaves_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    _bf16_kernels(monkeypatch, True)
    seen = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            seen.append(out.dtype)
            return out

    model = nn.Sequential(Watched(4, 2), nn.BatchNorm1d(2)).eval().requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seconds = measured(model, torch.rand(4, 4))
    assert set(seconds) == {"fp32", "bf16"} and min(seconds.values()) > 0
    assert {torch.float32, torch.bfloat16} == set(seen)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(parameter.requires_grad for parameter in model.parameters()) and not model.training


def test_a_training_runs_in_the_precision_that_was_chosen(workload: Workload, timed: dict[str, float]) -> None:
    ctx = MergeContext(workload)
    ctx.precisions = Precisions("auto", {})
    from merger.training.recipe import Recipe

    assert ctx.training(ctx.models(["q0"]), Recipe()).precisions == {"q0": "bf16"}
    ctx.precisions = Precisions("fp32", {})
    assert ctx.training(ctx.models(["q0"]), Recipe()).precisions == {"q0": "fp32"}


@pytest.mark.parametrize(("native", "chosen"), [(True, "bf16"), (False, "fp32")])
def test_the_rule_needs_no_clock(monkeypatch: pytest.MonkeyPatch, native: bool, chosen: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    depthwise = nn.Sequential(*(nn.Conv2d(4, 4, 3, groups=4) for _ in range(3)))
    assert by_rule(depthwise, torch.device("cpu")) == "fp32"
    assert by_rule(depthwise, torch.device("cuda")) == chosen


def test_autocast_obeys() -> None:
    layer = nn.Linear(2, 2)
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        with autocast(precision, torch.device("cpu")):
            assert layer(torch.rand(1, 2)).dtype == dtype


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(InputError, match="precision: 'fp8' is unknown; choose one of: auto, fp32, tf32, bf16"):
        MergeOptions(precision="fp8")


def test_a_resumed_merge_trains_in_the_precision_it_began_with_and_the_bundle_says_so(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timed: dict[str, float]
) -> None:
    must_train(monkeypatch)
    seen: set[str] = set()

    def interrupt_after_a_trained_round(event: str, **fields: Any) -> None:
        seen.add(event)
        if event == "round" and "precision" in seen:
            raise KeyboardInterrupt

    options = replace(QUICK, precision="auto", margin=0.9)
    straight = merge(workload, tmp_path / "straight.gemel", "gemel", options=options)
    with pytest.raises(KeyboardInterrupt):
        merge(workload, tmp_path / "b.gemel", "gemel", options=options, progress=interrupt_after_a_trained_round)
    timed["bf16"] = 9.0  # measured again, fp32 would be taken
    merge(workload, tmp_path / "b.gemel", "gemel", resume=True, options=options)
    manifest = open_bundle(tmp_path / "b.gemel").manifest
    assert manifest == open_bundle(straight.bundle).manifest
    assert {query.trained for query in manifest.queries} <= {Trained("bf16"), None}
    assert any(query.trained for query in manifest.queries)


@pytest.mark.parametrize(("method", "trained"), [("none", None), ("ceiling", None), ("joint", Trained("fp32"))])
def test_a_bundle_names_a_precision_only_where_something_was_trained(
    workload: Workload, tmp_path: Path, method: str, trained: Trained | None
) -> None:
    options = replace(QUICK, recipe=replace(QUICK.recipe, epochs=1))
    merge(workload, tmp_path / "b.gemel", method, options=options)
    for query in open_bundle(tmp_path / "b.gemel").queries:
        changed = query.evidence is not None and query.evidence["merged"] != query.evidence["original"]
        assert query.trained in (None, trained) and (not changed or query.trained == trained)


def test_a_query_that_left_as_its_original_was_not_trained(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apart(ctx: MergeContext, *_: Any) -> Merged:
        states = {query: snapshot(model) for query, model in ctx.originals.items()}
        states["q0"]["stem.0.weight"] += 0.001
        assert ctx.settled(["q0", "q1", "q2"])
        return Merged(SharingPlan(), states)

    monkeypatch.setitem(merging_module.METHODS, "top-down", apart)
    merge(workload, tmp_path / "b.gemel", "top-down", options=QUICK)
    found = {query.id: query.trained for query in open_bundle(tmp_path / "b.gemel").queries}
    assert found == {"q0": Trained("fp32"), "q1": None, "q2": None}
