"""`trained`: in which precision a merge trained a query's model, kept in the manifest and checked."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from models.bundle import Trained, open_bundle, verify_bundle


def test_a_bundle_says_in_which_precision_its_models_were_trained(tmp_path, tied, writer) -> None:
    models, queries = tied()
    queries = [dataclasses.replace(queries[0], trained=Trained("bf16")), *queries[1:]]
    written = writer(tmp_path / "b.gemel", models, queries)
    assert verify_bundle(tmp_path / "b.gemel") == []
    manifest = open_bundle(tmp_path / "b.gemel").manifest
    assert manifest == written and manifest.format == 3
    assert [query.trained for query in manifest.queries] == [Trained("bf16"), None, None]


@pytest.mark.parametrize(
    "lie",
    [{"precision": "fp8"}, {}, {"precision": None}, ["fp32"], "fp32"],
    ids=["fp8", "none", "null", "list", "text"],
)
def test_a_precision_that_there_is_not_is_refused(sample, rewrite, lie: Any) -> None:
    rewrite(sample.path, lambda manifest, data, types: manifest["queries"][0].update(trained=lie))
    (problem,) = verify_bundle(sample.path)
    assert problem.startswith("queries[0].trained") and "\n" not in problem
