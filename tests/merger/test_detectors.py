"""Merging detectors: two of one stage, and one of two stages with a classifier on the same backbone.

Originals are untrained and trainings short: what is proved is what is shared, what stays private, and that the bundle
runs, not accuracy.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from edge_runtime.engines.torch_engine import TorchEngine
from edge_runtime.memory.arena import Arena
from edge_runtime.memory.store import Store
from merger import MergeOptions, MergeReport, Recipe, TopDownConfig, merge
from merger.context import MergeContext
from merger.training.distillation import REGION_PROPOSALS, record_inputs, watched_layers
from models.batchnorm import batchnorms_of
from models.bundle import Bundle, open_bundle, verify_bundle
from models.sharing.groups import ceiling_bytes
from models.sharing.layers import layers_of, layers_of_all
from models.workload import Workload
from models.zoo import build_query
from tests.merger.seen import classifier, detector, write
from tests.parameters import every

torch.set_num_threads(1)
RECIPE = Recipe(rate=1e-3, epochs=1, batch=2, frames_per_epoch=4)
OPTIONS = MergeOptions(RECIPE, precision="fp32")


@pytest.fixture(scope="module")
def one_stage(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """Two FastestDets."""
    queries = [detector("left", "fastestdet", 64), detector("right", "fastestdet", 96)]
    return write(tmp_path_factory.mktemp("one"), queries)


@pytest.fixture(scope="module")
def two_stage(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """A Faster R-CNN on a MobileNetV3, and a MobileNetV3."""
    queries = [
        detector("boxes", "fasterrcnn_mobilenet_v3_large_320_fpn", 64),
        classifier("labels", "mobilenet_v3_large", 64),
    ]
    return write(tmp_path_factory.mktemp("two"), queries)


ONE_STAGE_FIRST = every(["one_stage", "two_stage"], ["one_stage"])
"""Where training goes on for long, the Faster R-CNN takes a minute; other tests here merge it in any case."""


def _merge_and_check(
    workload: Workload, options: MergeOptions, out: Path, method: str
) -> tuple[MergeReport, Bundle, list[dict[str, Any]]]:
    """Merge, and check all that holds for every bundle."""
    report = merge(workload, out, method, options=options)
    assert verify_bundle(out) == []
    bundle = open_bundle(out)
    assert report.bytes_after == sum(e.nbytes for e in bundle.header.entries.values() if not e.is_pad)
    assert report.bytes_after == bundle.manifest.bytes.after
    log = [json.loads(line) for line in out.with_name(f"{out.name}.log.jsonl").read_text().splitlines()]
    sets = [row for row in log if "set" in row]
    built = {query.id: bundle.build(query.id).state_dict() for query in bundle.queries}
    for row in sets:
        (first, *others) = [built[query][f"{path}.weight"] for query, path in row["kept"]] or [torch.empty(0)]
        assert all(torch.equal(first, other) for other in others)
        assert len({bundle.query(query).tensors[f"{path}.weight"] for query, path in row["kept"]}) <= 1
    every = layers_of_all(workload.queries)
    heads = {(layer.query, f"{layer.path}.weight") for layer in every if layer.head}
    assert heads and heads.isdisjoint(member for one in bundle.manifest.shared for member in one.members)
    saved = sum(row["saved_bytes"] for row in sets)
    if method != "mainstream":
        assert report.bytes_before - report.bytes_after == saved + _equal_by_chance(bundle)
        _private_norms(workload, bundle)
    _runs(bundle)
    return report, bundle, sets


def _equal_by_chance(bundle: Bundle) -> int:
    """Bytes saved by vectors and counters that are equal, biases of zero for instance, though no set shares them."""
    small = [one for one in bundle.manifest.shared if bundle.tensor(one.tensor).ndim < 2]
    return sum(bundle.nbytes(one.tensor) * (len(one.members) - 1) for one in small)


def _private_norms(workload: Workload, bundle: Bundle) -> None:
    places = [member for one in bundle.manifest.shared for member in one.members]
    for query in workload.queries:
        model = build_query(query)
        norms = set(batchnorms_of(model))
        own = {path for path, part in model.named_modules() if part in norms}
        assert own
        kept = [key for name, key in places if name == query.id and key.rpartition(".")[0] in own]
        assert all(key.endswith("num_batches_tracked") for key in kept)


def _runs(bundle: Bundle) -> None:
    """Every query answers on the torch engine, bit by bit as its model built from the bundle."""
    store = Store.of_bundle(bundle)
    arena = Arena(store, sum(bundle.nbytes(name) for name in store.kinds) + (1 << 20))
    arena.change((), tuple(store.kinds))
    frame = np.random.default_rng(0).integers(0, 255, (96, 96, 3), dtype=np.uint8)
    for query in bundle.queries:
        engine = TorchEngine(bundle, query.id)
        engine.bind(arena.tensor)
        batch = query.preprocess.normalise(torch.stack([query.preprocess.resize(frame)]))
        with torch.inference_mode():
            wanted, found = bundle.build(query.id)(batch), engine.outputs([frame])
        for one, other in zip(_tensors(wanted), _tensors(found), strict=True):
            assert torch.equal(one, other)
        assert len(engine.run([frame])) == 1


def _tensors(outputs: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def _only_with_copies(of: str) -> Callable[[MergeContext, str, nn.Module], float]:
    """A ratio on val by which one query holds only with trained copies: fewer layers stand still than at most, and it
    is not as it begins, as merged, with norms as they are or measured again.
    """
    evaluated: Counter[int] = Counter()

    def ratio(ctx: MergeContext, query: str, model: nn.Module) -> float:
        if query != of:
            return 1.0
        still = sum(not parameter.requires_grad for parameter in model.parameters())
        evaluated[still] += 1
        return 1.0 if 0 < still < max(evaluated) and evaluated[still] > 2 else 0.9

    return ratio


def _after_training() -> Callable[[MergeContext, str, nn.Module], float]:
    """A ratio on val by which a query does not hold as it begins, with its norms as they are or measured again."""
    evaluated: Counter[str] = Counter()

    def ratio(ctx: MergeContext, query: str, model: nn.Module) -> float:
        evaluated[query] += 1
        return 1.0 if evaluated[query] > 2 else 0.5

    return ratio


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["one_stage", "two_stage"])
def test_top_down_detectors_share_all_but_one_repaired(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    workload = request.getfixturevalue(kind)
    repaired = workload.queries[0].id
    monkeypatch.setattr(MergeContext, "ratio", _only_with_copies(repaired))
    options = replace(OPTIONS, top_down=TopDownConfig(share_suffixes=False, permute_channels=False))
    report, bundle, sets = _merge_and_check(workload, options, tmp_path / "b.gemel", "top-down")
    saved = sum(row["saved_bytes"] for row in sets)
    assert 0.4 * ceiling_bytes(layers_of_all(workload.queries)) < saved < ceiling_bytes(layers_of_all(workload.queries))
    assert {row["outcome"] for row in sets} == {"kept", "refused"}
    assert {query for row in sets for query in row["in_the_way"]} >= {repaired}
    assert bundle.query(repaired).trained is not None and report.flops > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ONE_STAGE_FIRST)
def test_gemel_detectors_share_layers_after_training(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    workload = request.getfixturevalue(kind)
    monkeypatch.setattr(MergeContext, "ratio", _after_training())
    ctx = MergeContext(workload)
    ctx.open()
    options = replace(OPTIONS, max_flops=ctx.flops.total + 1)  # one group, and no other is begun
    report, bundle, sets = _merge_and_check(workload, options, tmp_path / "b.gemel", "gemel")
    assert [row["outcome"] for row in sets] == ["kept"] + ["untried"] * (len(sets) - 1) and len(sets) > 10
    assert sets[0]["flops"] == pytest.approx(report.flops - ctx.flops.total)
    assert report.bytes_before > report.bytes_after
    assert all(query.trained for query in bundle.queries)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["one_stage", "two_stage"])
def test_ceiling_of_detectors_shares_every_group(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    workload = request.getfixturevalue(kind)
    _, bundle, sets = _merge_and_check(workload, OPTIONS, tmp_path / "b.gemel", "ceiling")
    assert sum(row["saved_bytes"] for row in sets) == ceiling_bytes(layers_of_all(workload.queries))
    assert not any(query.trained for query in bundle.queries)


@pytest.mark.slow
def test_detectors_of_one_architecture_share_a_frozen_prefix(
    one_stage: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MergeContext, "ratio", _after_training())
    _, bundle, sets = _merge_and_check(one_stage, OPTIONS, tmp_path / "b.gemel", "mainstream")
    first, second = (bundle.query(query).tensors for query in ("left", "right"))
    same = {name.rpartition(".")[0] for name in first if first[name] == second[name] and "num_b" not in name}
    assert "backbone.first_conv.0" in same and "backbone.first_conv.1" in same
    assert {row["outcome"] for row in sets} == {"kept"}


@pytest.mark.exhaustive
def test_detector_and_classifier_share_no_prefix(two_stage: Workload, tmp_path: Path) -> None:
    report, _, sets = _merge_and_check(two_stage, OPTIONS, tmp_path / "b.gemel", "mainstream")
    assert sets == [] and report.saved_fraction < 0.001


def test_watched_layers_of_detectors_are_their_heads(one_stage: Workload, two_stage: Workload) -> None:
    found = {}
    for query in (*one_stage.queries, *two_stage.queries):
        model = build_query(query).eval()
        paths = watched_layers(query, model)
        with record_inputs(model, paths) as seen, torch.no_grad():
            model(torch.randn(2, 3, query.input_size, query.input_size))
        assert seen and all(len(each) == 2 for each in seen)
        found[query.id] = paths
    assert found["boxes"] == [REGION_PROPOSALS] and found["labels"] == ["classifier.3"]
    heads = {layer.path for layer in layers_of(one_stage.queries[0]) if layer.head}
    assert set(found["left"]) == heads and len(heads) > 0
