"""The comparison of merges: each cell once, interrupted and resumed, and tables that say what the cells hold."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import gemel.merger.checkpoint as checkpoint_module
from benchmarks.merging import merge
from benchmarks.merging.cells import EQUAL, Cell, Weight, path_of, read_cells
from benchmarks.merging.tables import summary
from gemel.merger import MergeOptions, Recipe, TrainOptions, train_originals
from gemel.models.errors import InputError
from gemel.models.workload import load_workload
from tests.merger.tiny import SEED, write_random_weights, write_workload

QUICK = ("--rate", "0.002", "--epochs", "3", "--frames-per-epoch", "64")


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train_originals(
        load_workload(write_workload(folder)), seed=SEED, options=TrainOptions(rate=3e-3, passes=360, max_cycles=1)
    )
    return folder


@pytest.fixture
def workload(trained_folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained_folder, tmp_path / "tiny")
    return tmp_path / "tiny" / "workload.yaml"


def call(workload: Path, tmp_path: Path, *words: str) -> int:
    places = ("--out", str(tmp_path / "cells"))
    return merge.main(["--workloads", str(workload), "--seeds", "0", *QUICK, *places, *words])


def cells_of(text: str, title: str) -> dict[str, list[str]]:
    """The rows of the table under a title, by their first cell."""
    part = text.split(f"### {title}", 1)[1].split("###")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:1] == "|"]
    return {row[0]: row for row in rows[2:]}


def test_interrupted_merges_resume_and_are_compared(
    workload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = dataclasses.replace(checkpoint_module.CONFIG, save_interval_s=0.0)
    monkeypatch.setattr(checkpoint_module, "CONFIG", config)
    straight = merge.merge

    def interrupt_first(*given: Any, **keys: Any) -> Any:
        def progress(event: str, **fields: Any) -> None:
            if event == "attempt":
                raise KeyboardInterrupt

        return straight(*given, **{**keys, "progress": progress})

    with monkeypatch.context() as patch:
        patch.setattr(merge, "merge", interrupt_first)
        assert call(workload, tmp_path, "--arms", "top-down", "gemel", "--accept-unproven") == merge.INTERRUPTED
    folder = tmp_path / "cells" / "tiny"
    assert (folder / "gemel-seed0.bundle.work").is_dir() and not (folder / "gemel-seed0.json").exists()
    first = (folder / "top-down-seed0.json").read_bytes()
    assert "interrupted" in capsys.readouterr().err

    assert call(workload, tmp_path, "--arms", "top-down", "gemel", "--accept-unproven") == 0
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
        assert rows[cell.arm][8] == f"{kept['flops']:.3g}"
        assert cell.asked["options"]["max_flops"] is None and cell.machine["cores"] and cell.date.count("-") == 2
        assert cell.accepted_steps()[-1][1] == pytest.approx(saved, abs=EQUAL * cell.ceiling_bytes)


def test_summary_is_made_of_the_cells_alone(workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(workload, tmp_path, "--arms", "none", "ceiling") == 0
    written = capsys.readouterr().out
    shutil.rmtree(workload.parent)
    assert merge.main(["--summary", "--out", str(tmp_path / "cells")]) == 0
    assert capsys.readouterr().out == written
    rows = cells_of(written, "Arms")
    assert rows["none"][5] == "2 of 2" and float(rows["ceiling"][2]) >= 1


def test_bundles_are_kept_only_with_keep(workload: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cells" / "tiny"
    assert call(workload, tmp_path, "--arms", "none", "--keep") == 0
    assert sorted(path.name for path in folder.iterdir()) == ["none-seed0.bundle", "none-seed0.json"]
    (folder / "none-seed0.json").unlink()
    assert call(workload, tmp_path, "--arms", "none") == 0
    assert [path.name for path in folder.iterdir()] == ["none-seed0.json"]


def test_bundle_without_its_cell_is_merged_again(workload: Path, tmp_path: Path) -> None:
    left = tmp_path / "cells" / "tiny" / "none-seed0.bundle"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"written, then interrupted")
    assert call(workload, tmp_path, "--arms", "none") == 0
    assert not left.exists() and left.with_suffix(".json").is_file()


def test_cells_of_other_options_or_originals_are_refused(
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


def test_other_target_is_a_copy_beside_the_workload(workload: Path, tmp_path: Path) -> None:
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


def test_refused_merge_does_not_stop_the_others(
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
def test_bad_arguments_are_one_line_before_any_merge(
    words: tuple[str, ...], said: str, workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(workload, tmp_path, *words) == merge.BAD_INPUT
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and not (tmp_path / "cells").exists()


def make_cell(arm: str, flops: float, saved: int, log: tuple[dict, ...] = (), seed: int = 0, **keys: Any) -> Cell:
    """A cell of two queries with three common layers of 100, 200 and 300 bytes: ceiling 600 of 2000 bytes."""
    query = {"ratio": 0.97, "met": True, "state": "proven", "agreement": 0.99, "worth": True}
    result = {
        "bytes_before": 2000, "bytes_after": 2000 - saved, "saved_fraction": saved / 2000, "ceiling_fraction": 0.3,
        "seconds": 5.0, "flops": flops, "queries": [{**query, "id": "a"}, {**query, "id": "b", **keys}],
    }  # fmt: skip
    weights = tuple(Weight(query, f"layer{size}", 100 * size) for query in "abc" for size in (1, 2, 3))
    machine = {"cores": 2, "cpu": "x", "device": "cpu", "torch": "2", "load": 1.0}
    asked = {"options": {"weights": "fp32"}}
    return Cell("tiny", "tiny", 0.95, arm, seed, asked, machine, "2026-01-01", weights, result, log)


def log_row(size: int, members: str, kept: str, flops: float) -> dict[str, Any]:
    return {"members": [[q, f"layer{size}"] for q in members], "kept": [[q, f"layer{size}"] for q in kept],
            "flops": flops}  # fmt: skip


def test_accepted_steps_of_a_search_come_from_its_log() -> None:
    log = (log_row(3, "ab", "ab", 10.0), log_row(2, "ab", "", 20.0), log_row(1, "ab", "ab", 30.0))
    cell = make_cell("gemel", 40.0, 402, log)
    assert cell.accepted_steps() == [(0.0, 0.0), (10.0, 300.0), (30.0, 400.0)]
    assert cell.flops_to(300) == 10.0 and cell.flops_to(301) == 30.0 and cell.flops_to(402) is None
    assert cell.flops_to(400.5) == 30.0  # a counter that is equal by chance is no difference


def test_accepted_steps_before_others_joined_count() -> None:
    cell = make_cell("top-down", 40.0, 600, ({"sprint": 1, "flops": 9.0}, {"best_bytes": 300, "flops": 10.0}))
    assert cell.accepted_steps() == [(0.0, 0.0), (10.0, 300.0), (40.0, 600.0)]
    assert cell.flops_to(300) == 10.0 and cell.flops_to(301) == 40.0


def test_accepted_steps_at_a_validation_count() -> None:
    epochs = [{"sprint": 1, "epoch": n, "saved_bytes": saved, "flops": flops}
              for n, (saved, flops) in enumerate([(0, 9.0), (200, 10.0), (100, 11.0), (400, 12.0)])]  # fmt: skip
    told = {"recipe": {}, "flops": 13.0}
    taken = {"takes": "a", "accepted": True, "accepted_bytes": 500, "flops": 20.0}
    held = [(0.0, 0.0), (10.0, 200.0), (12.0, 400.0)]
    assert make_cell("top-down", 40.0, 600, (*epochs, told)).accepted_steps() == [*held, (40.0, 600.0)]
    assert make_cell("top-down", 40.0, 600, (*epochs, told, taken)).accepted_steps() == [
        *held,
        (20.0, 500.0),
        (40.0, 600.0),
    ]
    steps = make_cell("top-down", 40.0, 600, tuple(epochs)).accepted_steps()
    assert steps == [(0.0, 0.0), (40.0, 600.0)], "it kept none of these"


def test_smaller_attempt_counts_only_with_more_members() -> None:
    log = (log_row(3, "abc", "ab", 10.0), log_row(3, "abc", "ab", 20.0), log_row(3, "abc", "abc", 30.0))
    assert make_cell("gemel", 40.0, 600, log).accepted_steps() == [(0.0, 0.0), (10.0, 300.0), (30.0, 600.0)]


def test_flops_to_equal_savings_use_the_others_end() -> None:
    log = (log_row(3, "ab", "ab", 10.0), log_row(2, "ab", "ab", 60.0))
    text = summary([make_cell("top-down", 20.0, 600), make_cell("gemel", 90.0, 500, log)])
    part = text.split("### FLOPs to equal savings")[1]
    assert "| 0 | `gemel` ended with | 0.833 | 20 | 60 | 0.333 |" in part
    assert "| 0 | `top-down` ended with | 1.000 | 20 | never, in 90 | below 0.222 |" in part
    text = summary([make_cell("top-down", 20.0, 300), make_cell("gemel", 90.0, 500, log)])
    assert "| 0 | `gemel` ended with | 0.833 | never, in 20 | 60 | - |" in text
    assert "| 0 | `top-down` ended with | 0.500 | 20 | 10 | 2.000 |" in text
    only = summary(
        [make_cell("top-down", 20.0, 600), make_cell("gemel", 90.0, 0, (log_row(3, "ab", "", 90.0),), seed=1)]
    )
    assert "FLOPs to equal savings" not in only


def test_seeds_are_summed_up_by_mean_range_and_worst() -> None:
    missed = {"ratio": 0.93, "met": False, "state": "not proven"}
    cells = [make_cell("top-down", 20.0, 600), make_cell("top-down", 40.0, 540, seed=1, **missed)]
    row = cells_of(summary(cells), "Arms")["top-down"]
    assert row == [
        "top-down",
        "2",
        "0.950 (0.900..1.000)",
        "0.285 (0.270..0.300)",
        "0.930",
        "1 of 2",
        "1 of 2",
        "0.990",
        "30",
        "5",
    ]


def test_targets_of_one_workload_are_side_by_side() -> None:
    other = make_cell("top-down", 20.0, 300, met=False)
    cells = [make_cell("top-down", 20.0, 600), dataclasses.replace(other, name="tiny-0.99", target=0.99)]
    assert "| top-down | 1.000 | 0.500 ! |" in summary(cells).split("at each target")[1]


def test_packed_weights_are_an_arm_of_their_own() -> None:
    past = dataclasses.replace(make_cell("top-down", 30.0, 900), asked={"options": {"weights": "int8"}})
    rows = cells_of(summary([make_cell("top-down", 20.0, 600), past]), "Arms")
    assert rows["top-down"][2] == "1.000" and rows["top-down, int8"][2] == "1.500"


def test_cell_reads_as_it_was_written(tmp_path: Path) -> None:
    cell = make_cell("gemel", 40.0, 400, (log_row(3, "ab", "ab", 10.0),))
    (tmp_path / "tiny").mkdir()
    cell.write(tmp_path)
    assert read_cells(tmp_path) == [cell] and read_cells(tmp_path)[0].accepted_steps() == cell.accepted_steps()


def test_bound_of_an_arm_is_its_option(workload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[MergeOptions] = []

    def refusing(*given: Any, options: MergeOptions, **keys: Any) -> None:
        asked.append(options)
        raise InputError("x", "is no merge", "none")

    monkeypatch.setattr(merge, "merge", refusing)
    assert call(workload, tmp_path, "--arms", "top-down", "--max-flops", "2.5e9") == merge.BAD_INPUT
    monkeypatch.setitem(merge.MAX_FLOPS, "tiny", 7e9)
    assert call(workload, tmp_path, "--arms", "top-down") == merge.BAD_INPUT
    recipe = Recipe(rate=0.002, epochs=3, frames_per_epoch=64)
    assert [one.to_json() for one in asked] == [
        MergeOptions(recipe, max_flops=bound, weights="fp32").to_json() for bound in (2.5e9, 7e9)
    ]


def test_packed_weights_have_their_own_cells(workload: Path, tmp_path: Path, monkeypatch) -> None:
    asked: list[tuple[str, str]] = []

    def noting(variant: merge.Variant, arm: str, seed: int, options: MergeOptions, out: Path, keep: bool) -> None:
        asked.append((variant.name, options.weights))

    monkeypatch.setattr(merge, "measure", noting)
    for given in ((), ("--weights", "int8")):
        assert call(workload, tmp_path, "--arms", "top-down", *given) == 0
    assert asked == [("tiny", "fp32"), ("tiny-int8", "int8")]
