"""A tiny workload whose models have repeated layers, merged at the ceiling with nothing retrained."""

from __future__ import annotations

import pytest
import yaml

from merger import TrainOptions, train_originals
from merger.bench.merged import Merged
from merger.bench.workbench import Workbench
from merger.journal.states import snapshot
from merger.methods.wide import whole_plan
from merger.start.choosing import averaged
from models.workload import Workload, load_workload
from tests.merger.beyond.tries import OPTIONS
from tests.merger.deep import FACTORY
from tests.merger.tiny import SEED, write_workload


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """Two queries whose models have two and four equal blocks, with trained originals."""
    folder = tmp_path_factory.mktemp("deep")
    keys = {"model": FACTORY, "model_args": {"blocks": 2}, "accuracy_target": 0.7}
    path = write_workload(folder, queries=2, frames=40, **keys)
    document = yaml.safe_load(path.read_text())
    document["queries"][0]["model_args"] = {"blocks": 4}
    path.write_text(yaml.safe_dump(document))
    train_originals(load_workload(path), seed=SEED, options=TrainOptions(rate=3e-3, passes=800, max_cycles=1))
    return load_workload(path)


@pytest.fixture
def bench(deep: Workload) -> Workbench:
    return Workbench(deep)


@pytest.fixture
def merged(bench: Workbench) -> Merged:
    """Everything tied with the mean weights, nothing retrained."""
    plan = whole_plan(bench, OPTIONS)
    return Merged(plan, averaged(plan, {query: snapshot(model) for query, model in bench.originals.items()}))
