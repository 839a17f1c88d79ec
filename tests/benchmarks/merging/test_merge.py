"""The comparison of merges: each cell once, interrupted and resumed, and tables that say what the cells hold."""

from __future__ import annotations

import dataclasses
import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

import merger.checkpoint as checkpoint_module
from benchmarks.merging import merge
from benchmarks.merging.cells import EQUAL, Cell, Weight, path_of, read_cells
from benchmarks.merging.plot import curves, picture
from benchmarks.merging.tables import summary
from merger import MergeOptions, Recipe, TrainOptions, train_originals
from models.errors import InputError
from models.workload import load_workload
from tests.merger.tiny import SEED, write_random_weights, write_workload

QUICK = ("--rate", "0.002", "--epochs", "3", "--frames-per-epoch", "64")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train_originals(
        load_workload(write_workload(folder)), seed=SEED, options=TrainOptions(rate=3e-3, passes=360, max_cycles=1)
    )
    return folder


@pytest.fixture
def workload(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "tiny")
    return tmp_path / "tiny" / "workload.yaml"


def call(workload: Path, tmp_path: Path, *words: str) -> int:
    (tmp_path / "docs").mkdir(exist_ok=True)
    places = ("--out", str(tmp_path / "cells"), "--pictures", str(tmp_path / "docs"))
    return merge.main(["--workloads", str(workload), "--seeds", "0", *QUICK, *places, *words])


def cells_of(text: str, title: str) -> dict[str, list[str]]:
    """The rows of the table under a title, by their first cell."""
    part = text.split(f"### {title}", 1)[1].split("###")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:1] == "|"]
    return {row[0]: row for row in rows[2:]}


def test_two_arms_are_interrupted_resumed_and_compared(
    workload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoint_module, "INTERVAL_S", 0.0)
    straight = merge.merge

    def interrupted(*given: Any, **keys: Any) -> Any:
        def progress(event: str, **fields: Any) -> None:
            if event == "attempt":
                raise KeyboardInterrupt

        return straight(*given, **{**keys, "progress": progress})

    with monkeypatch.context() as patch:
        patch.setattr(merge, "merge", interrupted)
        assert call(workload, tmp_path, "--arms", "top-down", "gemel") == merge.INTERRUPTED
    folder = tmp_path / "cells" / "tiny"
    assert (folder / "gemel-seed0.bundle.work").is_dir() and not (folder / "gemel-seed0.json").exists()
    first = (folder / "top-down-seed0.json").read_bytes()
    assert "interrupted" in capsys.readouterr().err

    assert call(workload, tmp_path, "--arms", "top-down", "gemel") == 0
    out, err = capsys.readouterr()
    assert "[tiny] top-down, seed 0: already done" in err and (folder / "top-down-seed0.json").read_bytes() == first
    assert sorted(path.name for path in folder.iterdir()) == ["gemel-seed0.json", "top-down-seed0.json"]

    rows = cells_of(out, "Arms")
    assert list(rows) == ["gemel", "top-down"]
    for cell in read_cells(tmp_path / "cells"):
        kept = json.loads(path_of(tmp_path / "cells", "tiny", cell.arm, 0).read_text())["result"]
        saved = kept["bytes_before"] - kept["bytes_after"]
        ratios = [query["ratio"] for query in kept["queries"]]
        assert saved > 0 and rows[cell.arm][2] == f"{saved / (kept['ceiling_fraction'] * kept['bytes_before']):.3f}"
        assert rows[cell.arm][4] == f"{min(ratios):.3f}"
        assert rows[cell.arm][5] == f"{sum(query['met'] for query in kept['queries'])} of 2"
        assert rows[cell.arm][7] == f"{kept['work']:.3g}"
        assert cell.asked["options"]["max_flops"] is None and cell.machine["cores"] and cell.date.count("-") == 2
        assert cell.accepted()[-1][1] == pytest.approx(saved, abs=EQUAL * cell.ceiling_bytes)
    svg = ElementTree.fromstring((tmp_path / "docs" / "merge-tiny.svg").read_text())
    assert len(svg.findall(f"{SVG}path")) == 2


def test_the_summary_needs_the_cells_alone(workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(workload, tmp_path, "--arms", "none", "ceiling") == 0
    written = capsys.readouterr().out
    shutil.rmtree(workload.parent)
    assert merge.main(["--summary", "--out", str(tmp_path / "cells")]) == 0
    assert capsys.readouterr().out == written
    rows = cells_of(written, "Arms")
    assert rows["none"][5] == "2 of 2" and float(rows["ceiling"][2]) >= 1
    assert not (tmp_path / "docs" / "merge-tiny.svg").exists()


def test_bundles_are_kept_where_asked_for(workload: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cells" / "tiny"
    assert call(workload, tmp_path, "--arms", "none", "--keep") == 0
    assert sorted(path.name for path in folder.iterdir()) == ["none-seed0.bundle", "none-seed0.json"]
    (folder / "none-seed0.json").unlink()
    assert call(workload, tmp_path, "--arms", "none") == 0
    assert [path.name for path in folder.iterdir()] == ["none-seed0.json"]


def test_a_bundle_whose_figures_were_lost_is_merged_again(workload: Path, tmp_path: Path) -> None:
    left = tmp_path / "cells" / "tiny" / "none-seed0.bundle"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"written, then interrupted")
    assert call(workload, tmp_path, "--arms", "none") == 0
    assert not left.exists() and left.with_suffix(".json").is_file()


def test_cells_of_other_options_or_originals_are_not_mixed(
    workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(workload, tmp_path, "--arms", "none") == 0
    kept = path_of(tmp_path / "cells", "tiny", "none", 0).read_bytes()
    assert call(workload, tmp_path, "--arms", "none", "--max-flops", "3e9") == merge.BAD_INPUT
    assert "none-seed0.json: was measured with another state of: options" in capsys.readouterr().err
    write_random_weights(workload)
    assert call(workload, tmp_path, "--arms", "none") == merge.BAD_INPUT
    assert "another state of: workload" in capsys.readouterr().err
    assert path_of(tmp_path / "cells", "tiny", "none", 0).read_bytes() == kept


def test_another_target_is_a_copy_beside_the_workload(workload: Path, tmp_path: Path) -> None:
    document = yaml.safe_load(workload.read_text())
    document["queries"][0]["accuracy_target"] = 0.8
    workload.write_text(yaml.safe_dump(document))
    own = merge.variant_of(load_workload(workload), None)
    other = merge.variant_of(load_workload(workload), 0.99)
    assert own.name == "tiny" and own.workload.path == workload
    assert other.name == "tiny-0.99" and other.workload.path == workload.with_name("workload-0.99.yaml")
    assert {query.accuracy_target for query in other.workload.queries} == {0.99}
    assert [query.weights for query in other.workload.queries] == [query.weights for query in own.workload.queries]
    assert merge.variant_of(other.workload, 0.99).own
    assert call(workload, tmp_path, "--arms", "none", "--targets", "0.9", "0.99") == 0
    assert {(cell.name, cell.target) for cell in read_cells(tmp_path / "cells")} == {
        ("tiny-0.9", 0.9), ("tiny-0.99", 0.99),
    }  # fmt: skip


def test_what_is_refused_does_not_stop_the_others(
    workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    untrained = write_workload(tmp_path / "untrained")
    assert call(untrained, tmp_path, "--workloads", str(untrained), str(workload), "--arms", "none") == merge.BAD_INPUT
    out, err = capsys.readouterr()
    assert "gemel train" in err and "| none |" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--arms", "wider"), "'wider' is unknown"),
        (("--workloads", "nowhere"), "python -m benchmarks.data.prepare nowhere"),
    ],
)
def test_bad_words_are_one_line_before_any_work(
    words: tuple[str, ...], said: str, workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(workload, tmp_path, *words) == merge.BAD_INPUT
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and not (tmp_path / "cells").exists()


def made(arm: str, flops: float, saved: int, log: tuple[dict, ...] = (), seed: int = 0, **keys: Any) -> Cell:
    """A cell of two queries with three common layers of 100, 200 and 300 bytes: ceiling 600 of 2000 bytes."""
    query = {"ratio": 0.97, "met": True, "certain": True, "worth": True}
    result = {
        "bytes_before": 2000, "bytes_after": 2000 - saved, "saved_fraction": saved / 2000, "ceiling_fraction": 0.3,
        "seconds": 5.0, "flops": flops, "queries": [{**query, "id": "a"}, {**query, "id": "b", **keys}],
    }  # fmt: skip
    weights = tuple(Weight(query, f"layer{size}", 100 * size) for query in "abc" for size in (1, 2, 3))
    machine = {"cores": 2, "cpu": "x", "device": "cpu", "torch": "2", "load": 1.0}
    asked = {"options": {"weights": "fp32"}}
    return Cell("tiny", "tiny", 0.95, arm, seed, asked, machine, "2026-01-01", weights, result, log)


def tried(size: int, members: str, kept: str, flops: float) -> dict[str, Any]:
    return {"members": [[q, f"layer{size}"] for q in members], "kept": [[q, f"layer{size}"] for q in kept],
            "flops": flops}  # fmt: skip


def test_a_searchs_log_tells_when_it_had_accepted_what() -> None:
    log = (tried(3, "ab", "ab", 10.0), tried(2, "ab", "", 20.0), tried(1, "ab", "ab", 30.0))
    cell = made("gemel", 40.0, 402, log)
    assert cell.accepted() == [(0.0, 0.0), (10.0, 300.0), (30.0, 400.0)]
    assert cell.work_to(300) == 10.0 and cell.work_to(301) == 30.0 and cell.work_to(402) is None
    assert cell.work_to(400.5) == 30.0  # a counter that is equal by chance is no difference


def test_what_was_accepted_before_the_others_joined_counts_from_then_on() -> None:
    cell = made("wide", 40.0, 600, ({"sprint": 1, "flops": 9.0}, {"accepted_bytes": 300, "flops": 10.0}))
    assert cell.accepted() == [(0.0, 0.0), (10.0, 300.0), (40.0, 600.0)]
    assert cell.work_to(300) == 10.0 and cell.work_to(301) == 40.0


def test_what_held_at_a_validation_or_with_a_portion_counts_from_then_on() -> None:
    epochs = [{"sprint": 1, "epoch": n, "saved_bytes": saved, "flops": flops}
              for n, (saved, flops) in enumerate([(0, 9.0), (200, 10.0), (100, 11.0), (400, 12.0)])]  # fmt: skip
    told = {"recipe": {}, "flops": 13.0}
    taken = {"takes": "a", "accepted": True, "accepted_bytes": 500, "flops": 20.0}
    held = [(0.0, 0.0), (10.0, 200.0), (12.0, 400.0)]
    assert made("wide", 40.0, 600, (*epochs, told)).accepted() == [*held, (40.0, 600.0)]
    assert made("wide", 40.0, 600, (*epochs, told, taken)).accepted() == [*held, (20.0, 500.0), (40.0, 600.0)]
    assert made("wide", 40.0, 600, tuple(epochs)).accepted() == [(0.0, 0.0), (40.0, 600.0)], "it kept none of these"


def test_a_smaller_attempt_counts_only_when_more_members_hold() -> None:
    log = (tried(3, "abc", "ab", 10.0), tried(3, "abc", "ab", 20.0), tried(3, "abc", "abc", 30.0))
    assert made("gemel", 40.0, 600, log).accepted() == [(0.0, 0.0), (10.0, 300.0), (30.0, 600.0)]


def test_work_to_equal_savings_takes_each_at_the_others_end() -> None:
    log = (tried(3, "ab", "ab", 10.0), tried(2, "ab", "ab", 60.0))
    text = summary([made("wide", 20.0, 600), made("gemel", 90.0, 500, log)])
    part = text.split("### Work to equal savings")[1]
    assert "| 0 | `gemel` ended with | 0.833 | 20 | 60 | 0.333 |" in part
    assert "| 0 | `wide` ended with | 1.000 | 20 | never, in 90 | below 0.222 |" in part
    text = summary([made("wide", 20.0, 300), made("gemel", 90.0, 500, log)])
    assert "| 0 | `gemel` ended with | 0.833 | never, in 20 | 60 | - |" in text
    assert "| 0 | `wide` ended with | 0.500 | 20 | 10 | 2.000 |" in text
    only = summary([made("wide", 20.0, 600), made("gemel", 90.0, 0, (tried(3, "ab", "", 90.0),), seed=1)])
    assert "Work to equal savings" not in only


def test_seeds_are_summed_up_by_mean_range_and_worst() -> None:
    cells = [made("wide", 20.0, 600), made("wide", 40.0, 540, seed=1, ratio=0.93, met=False)]
    row = cells_of(summary(cells), "Arms")["wide"]
    assert row == ["wide", "2", "0.950 (0.900..1.000)", "0.285 (0.270..0.300)", "0.930", "1 of 2", "1 of 2", "30", "5",
                   "0.050 (0.000..0.100)"]  # fmt: skip


def test_targets_of_one_workload_stand_side_by_side() -> None:
    other = made("wide", 20.0, 300, met=False)
    cells = [made("wide", 20.0, 600), dataclasses.replace(other, name="tiny-0.99", target=0.99)]
    assert "| wide | 1.000 | 0.500 ! |" in summary(cells).split("at each target")[1]


def test_merge_with_packed_weights_is_an_arm_of_its_own() -> None:
    past = dataclasses.replace(made("wide", 30.0, 900), asked={"options": {"weights": "int8"}})
    rows = cells_of(summary([made("wide", 20.0, 600), past]), "Arms")
    assert rows["wide"][2] == "1.000" and rows["wide, int8"][2] == "1.500"


def test_the_picture_over_targets_has_a_line_per_arm_and_shows_misses() -> None:
    missed = dataclasses.replace(made("wide", 20.0, 300, met=False), name="tiny-0.99", target=0.99)
    gemel = [made("gemel", 20.0, 480), dataclasses.replace(made("gemel", 20.0, 120), name="tiny-0.99", target=0.99)]
    drawn = curves([made("wide", 20.0, 600), made("wide", 20.0, 540, seed=1), missed, *gemel])
    assert drawn is not None
    svg = ElementTree.fromstring(drawn)
    assert len(svg.findall(f"{SVG}path")) == 2
    dots = {dot.findtext(f"{SVG}title"): dot.get("fill") for dot in svg.findall(f"{SVG}circle")}
    assert dots.pop("wide, target 0.99: 50.0 % of the ceiling, missed on test") == "white"
    assert set(dots) == {"wide, target 0.95: 95.0 % of the ceiling", "gemel, target 0.95: 80.0 % of the ceiling",
                         "gemel, target 0.99: 20.0 % of the ceiling"}  # fmt: skip
    assert "white" not in dots.values() and curves([made("wide", 20.0, 600)]) is None


def test_the_picture_has_a_line_per_merge_that_accepts() -> None:
    log = (tried(3, "ab", "ab", 10.0), tried(2, "ab", "ab", 60.0))
    cells = [made("gemel", 90.0, 500, log), made("wide", 20.0, 600), made("wide", 30.0, 600, seed=1),
             made("ceiling", 1.0, 600)]  # fmt: skip
    drawn = picture(cells)
    assert drawn is not None
    svg = ElementTree.fromstring(drawn)
    paths = [path.get("d", "") for path in svg.findall(f"{SVG}path")]
    assert [path.count("V") for path in paths] == [2, 1, 1]
    texts = [text.text for text in svg.findall(f"{SVG}text")]
    assert "bytes saved, of the ceiling" in texts and "work: image passes × FLOPs, in 10¹" in texts
    assert "wide (2 seeds)" in texts and "ceiling" not in texts
    assert picture([made("none", 0.0, 0), made("joint", 5.0, 0)]) is None


def test_a_cell_is_read_as_it_was_written(tmp_path: Path) -> None:
    cell = made("gemel", 40.0, 400, (tried(3, "ab", "ab", 10.0),))
    (tmp_path / "tiny").mkdir()
    cell.write(tmp_path)
    assert read_cells(tmp_path) == [cell] and read_cells(tmp_path)[0].accepted() == cell.accepted()


def test_all_measured_cells_can_be_summed_up(repository: Path) -> None:
    folders = sorted((repository / "benchmarks" / "measured").glob("merge*"))
    heads = {
        "merge": "cifar: 4 queries, target 0.95",
        "merge-avx2": "gti: 4 queries, target 0.95",
        "merge-chosen": "gti-0.99: 4 queries, target 0.99",
    }
    assert [folder.name for folder in folders] == list(heads)
    for folder in folders:
        text = summary(read_cells(folder))
        assert f"## {heads[folder.name]}" in text and "Machines" in text


def test_the_bound_of_an_arm_is_its_option(workload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[MergeOptions] = []

    def refusing(*given: Any, options: MergeOptions, **keys: Any) -> None:
        asked.append(options)
        raise InputError("x", "is no merge", "none")

    monkeypatch.setattr(merge, "merge", refusing)
    assert call(workload, tmp_path, "--arms", "top-down", "--max-flops", "2.5e9") == merge.BAD_INPUT
    monkeypatch.setitem(merge.MAX_WORK, "tiny", 7e9)
    assert call(workload, tmp_path, "--arms", "top-down") == merge.BAD_INPUT
    recipe = Recipe(rate=0.002, epochs=3, frames_per_epoch=64)
    assert asked == [MergeOptions(recipe, False, max_flops=bound) for bound in (2.5e9, 7e9)]


def test_merge_with_packed_weights_has_its_own_cells(workload: Path, tmp_path: Path, monkeypatch) -> None:
    asked: list[tuple[str, str]] = []

    def noting(variant: merge.Variant, arm: str, seed: int, options: MergeOptions, out: Path, keep: bool) -> None:
        asked.append((variant.name, options.weights))

    monkeypatch.setattr(merge, "measure", noting)
    monkeypatch.setattr(merge, "draw", lambda *_: None)
    for given in ((), ("--weights", "int8")):
        assert call(workload, tmp_path, "--arms", "top-down", *given) == 0
    assert asked == [("tiny", "fp32"), ("tiny-int8", "int8")]
