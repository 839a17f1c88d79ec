"""The published CIFAR ResNets as a workload: what val and test are made of, and that the models fit their weights."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.data import prepare, published
from gemel.models.workload import load_workload


def make_archive(train: int, test: int) -> dict[str, list[str]]:
    sizes = {"train": train, "test": test}
    return {
        f"{part}/{label}": [f"{part}/{label}/{number:04d}.jpg" for number in range(count)]
        for part, count in sizes.items()
        for label in published.CLASSES
    }


def test_what_the_models_were_trained_on_is_neither_val_nor_test() -> None:
    planned = published.plan(make_archive(1200, 500))
    splits = {path: path.split("/")[0] for path in planned}
    assert all((splits[path] == "train") == name.startswith("train/") for path, name in planned.items())
    assert len(set(planned.values())) == len(planned), "no image twice"
    counts = Counter(tuple(path.split("/")[:2]) for path in planned)
    assert counts == {(split, label): most for split, most in published.MOST.items() for label in published.CLASSES}


def test_a_pack_without_a_class_is_one_clear_line() -> None:
    lists = make_archive(40, 16)
    del lists["test/frog"]
    with pytest.raises(prepare.PrepareError, match="test/frog; fetch the data again"):
        published.plan(lists)


def test_the_workload_names_what_is_prepared(repository: Path) -> None:
    queries = load_workload(repository / "benchmarks" / "workloads" / "published.yaml").queries
    assert {query.id for query in queries} == set(published.WEIGHTS)
    for query in queries:
        assert query.classes == published.CLASSES and query.camera == published.CAMERA
        assert query.model in published.WEIGHTS[query.id]


@pytest.mark.real
def test_the_real_weights_reach_what_is_said_of_them(real_data: Path, tmp_path: Path, capsys) -> None:
    from gemel.models.data import PreparedFrames, load_split
    from gemel.models.files.weights import load_weights
    from gemel.models.measures.evaluation import predict, score
    from gemel.models.tasks import task_of
    from gemel.models.zoo import build_query

    assert prepare.main(["published", "--data", str(real_data), "--out", str(tmp_path / "out"), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"kinds"}
    query = load_workload(tmp_path / "out" / "workload.yaml").queries[0]
    model = build_query(query).eval()
    load_weights(query, model)
    val = PreparedFrames(query, load_split(query, "val"))
    reached = score(task_of(query), predict(model, query, val), val.split.labels or (), query.classes, 0.0)
    assert reached > 0.75  # 0.917 on the images as they were; the pack has them as JPEG of quality 75
