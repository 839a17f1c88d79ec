"""How easy a workload is and its bytes in the fewest bits: on small networks, and what the tables say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.compression import easy, smallest
from benchmarks.compression.smallest import merged_of
from merger import TrainOptions, merge, train_originals
from merger.widths.search import _Search
from models.workload import load_workload
from tests.merger.kills import Killed, kill_after, store_at_every_chance
from tests.merger.tiny import SEED, write_workload


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    path = write_workload(folder, accuracy_target=0.5)
    train_originals(load_workload(path), seed=SEED, options=TrainOptions(rate=3e-3, passes=240, max_cycles=1))
    return path


def test_both_arms_are_measured_once_and_the_merged_one_is_smaller(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, kept = tmp_path / "tied.safetensors", tmp_path / "kept.json"
    report = merge(load_workload(trained), bundle, "ceiling")
    words = [str(trained), "--json", str(kept), "--weights", "int4"]
    assert smallest.main(words) == 0
    alone = json.loads(kept.read_text())["arms"]["none"]
    assert smallest.main([*words, "--bundle", str(bundle)]) == 0
    found = json.loads(kept.read_text())
    assert found["arms"]["none"] == alone and set(found["arms"]) == {"none", "ceiling"}
    assert "none: already done" in capsys.readouterr().err
    assert found["ceiling_fraction"] == pytest.approx(report.ceiling_fraction)
    assert alone["before_bytes"] == report.bytes_before > 2 * alone["bytes"]
    assert found["arms"]["ceiling"]["bytes"] < alone["bytes"]
    assert [query["id"] for query in alone["queries"]] == ["q0", "q1"]
    assert smallest.main([*words[:-1], "int8"]) == 2
    assert "was measured of tiny in int4" in capsys.readouterr().err


def test_an_interrupted_search_goes_on_where_it_was(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, asked, evaluated = tmp_path / "kept.json", list[str](), _Search._evaluated

    def noted(search: _Search, *given: Any) -> Any:
        asked.append(given[1])
        return evaluated(search, *given)

    monkeypatch.setattr(_Search, "_judged", noted)
    store_at_every_chance(monkeypatch)
    words = [str(trained), "--weights", "int4", "--json"]
    assert smallest.main([*words, str(tmp_path / "straight.json")]) == 0
    whole = list(asked)
    asked.clear()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(patch, 3)
        smallest.main([*words, str(kept)])
    assert not kept.exists() and (tmp_path / "kept.json.none.work").is_dir()
    assert 0 < len(asked) < len(whole) and smallest.main([*words, str(kept)]) == 0
    assert asked == whole, "what was judged is not judged again"
    straight, resumed = (json.loads(path.read_text())["arms"]["none"] for path in (tmp_path / "straight.json", kept))
    assert {**resumed, "seconds": 0} == {**straight, "seconds": 0}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.json", "straight.json"]


def test_a_merge_of_which_nothing_came_has_the_figures_of_the_originals(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, kept = tmp_path / "none.safetensors", tmp_path / "kept.json"
    merge(load_workload(trained), bundle, "none")
    words = [str(trained), "--json", str(kept), "--weights", "int4"]
    assert smallest.main(words) == 0
    monkeypatch.setattr(smallest, "merged_of", lambda ctx, path: ("wide", merged_of(ctx, path)[1]))
    monkeypatch.setattr(smallest, "smallest", lambda *_: pytest.fail("done again"))
    assert smallest.main([*words, "--bundle", str(bundle)]) == 0
    arms = json.loads(kept.read_text())["arms"]
    assert arms["wide"] == arms["none"]


@pytest.mark.parametrize(
    ("merged", "met", "holds"),
    [(520, True, "yes"), (530, True, "no"), (300, False, "no: a query is below its target")],
)
def test_the_claim_holds_within_the_limit_and_with_every_query_at_its_target(
    merged: int, met: bool, holds: str
) -> None:
    def arm(size: int, met: bool) -> dict[str, Any]:
        return {"before_bytes": 8000, "bytes": size, "queries": [{"met": True}, {"met": met}]}

    kept = {"workload": "w", "ceiling_fraction": 0.5, "arms": {"none": arm(1000, True), "wide": arm(merged, met)}}
    (row,) = smallest.rows([kept])
    assert row[-1] == holds and row[7:9] == (merged / 1000, 1.05 * 0.5) and len(row) == len(smallest.HEADS)
    del kept["arms"]["wide"]
    assert smallest.rows([kept])[0][-1] == "-"


def test_all_models_together_stand_beside_the_largest_of_them() -> None:
    def arm(nbytes: int, *ratios: float) -> dict[str, Any]:
        queries = [{"id": f"q{ratio}", "ratio": ratio, "met": ratio >= 0.95} for ratio in ratios]
        return {"bytes": nbytes, "queries": queries}

    kept = [
        {"workload": "gti", "arms": {"none": arm(8_000_000, 0.97, 0.94), "wide": arm(5_000_000, 0.96, 0.99)}},
        {"workload": "published", "arms": {"none": arm(1_000_000, 1.0)}},
    ]
    largest = 85_268_576  # a ResNet-34 of two classes, buffers and all
    none, merged = smallest.together(kept)
    assert none == ("`none`", 3, "9.00", pytest.approx(9e6 / largest, rel=1e-3), "2 of 3", "0.940 (q0.94)")
    assert merged == ("merged", 3, "6.00", pytest.approx(6e6 / largest, rel=1e-3), "3 of 3", "0.960 (q0.96)")


def test_a_bundle_of_another_workload_is_one_clear_line(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    merge(load_workload(trained), tmp_path / "b.safetensors", "none")
    other = trained.with_name("other.yaml")
    other.write_text(trained.read_text().replace("id: q1", "id: q2"))
    words = [str(other), "--json", str(tmp_path / "k.json"), "--bundle", str(tmp_path / "b.safetensors")]
    assert smallest.main(words) == 2
    assert "is no bundle of" in capsys.readouterr().err.splitlines()[-1]


def test_one_bit_is_the_sign_and_the_mean_magnitude_of_a_channel() -> None:
    weight = torch.tensor([[[1.0, -3.0]], [[0.0, 0.5]]])
    assert easy.rounded(weight, 1).tolist() == [[[2.0, -2.0]], [[0.25, 0.25]]]
    many = torch.randn(4, 64)
    errors = [float((easy.rounded(many, bits) - many).square().mean()) for bits in easy.BITS]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.05


def test_every_query_is_told_in_all_widths_and_by_its_stem(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "easy.json"
    assert easy.main([str(trained), "--json", str(kept)]) == 0
    found = json.loads(kept.read_text())
    for row, line in zip(found["queries"], capsys.readouterr().out.splitlines(), strict=True):
        assert set(row["bits"]) == {"1", "2", "3", "4"} and row["chance"] == 0.5
        assert row["probe"] > 0.9, "left or right is seen by a linear layer on the stem"
        assert line.split("\t")[1] == row["query"]
    del found["queries"][0]
    kept.write_text(json.dumps(found))
    assert easy.main([str(trained), "--json", str(kept)]) == 0
    assert "q1: already done" in capsys.readouterr().err
    assert [row["query"] for row in json.loads(kept.read_text())["queries"]] == ["q1", "q0"]
    rows = easy.rows([{**found, "queries": [{**found["queries"][0], "worth": False, "probe": None}]}])
    assert "(no evidence)" in rows[0][4] and rows[0][-2] == "-" and len(rows[0]) == len(easy.HEADS)


def test_a_workload_that_is_not_there_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for script in (easy, smallest):
        assert script.main([str(tmp_path / "none.yaml"), "--json", str(tmp_path / "x.json")]) == 2
        assert capsys.readouterr().err.startswith("error: ")
