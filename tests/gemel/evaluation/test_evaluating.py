"""`gemel eval`: the keys of its report, equal bytes for both arms, and a ledger that adds up."""

import errno
import json
import os
import random
import re

import numpy as np
import pytest

from gemel.cli import main
from gemel.evaluation import EvalOptions, evaluate
from gemel.realtime import paste_into_frame
from gemel.report.page import render_report
from models.bundle import open_bundle
from models.errors import InputError
from models.preprocess import crop
from tests.card import a_card


@pytest.fixture(scope="module")
def evaluated(tiny):
    return evaluate(tiny / "tiny.safetensors", tiny / "workload.yaml", tiny / "report", EvalOptions(seeds=2))


def test_the_report_has_every_key_that_the_design_promises(evaluated, tiny):
    assert {"offline", "streaming", "ledger"} <= set(evaluated)
    keys = {"arm", "memory", "memory_bytes", "query", "metric", "accuracy", "age_p95_ms", "spread"}
    keys |= {"age_p50_ms", "age_p99_ms"}
    assert all(keys <= set(row) for row in evaluated["streaming"])
    arms = {(row["arm"], row["memory"], row["query"]) for row in evaluated["streaming"]}
    assert len(arms) == len(evaluated["streaming"]) == 2 * 3 * 2
    assert json.loads((tiny / "report" / "report.json").read_text()) == evaluated


def test_both_arms_get_the_same_bytes_and_the_ledger_adds_up(evaluated):
    for memory in ("min", "50%", "75%"):
        rows = [row for row in evaluated["streaming"] if row["memory"] == memory]
        assert len({row["memory_bytes"] for row in rows}) == 1
    for row in evaluated["ledger"]:
        settled = row["processed"] + sum(row["dropped"].values()) + row["failed"] + row["pending"]
        assert row["received"] == settled > 0


def test_measured_bytes_agree_with_the_manifest(evaluated, tiny):
    counts, manifest = evaluated["bytes"], open_bundle(tiny / "tiny.safetensors").manifest
    assert counts["after"] == manifest.bytes.after < counts["before"]
    assert counts["resident_after"] == counts["after"]
    assert counts["resident_before"] >= counts["before"]
    parts = sum(row["private"] + row["shared_part"] for row in counts["queries"])
    assert parts == pytest.approx(counts["after"])


def test_an_original_that_guesses_is_called_no_evidence(evaluated):
    weak = [row for row in evaluated["offline"] if not row["worth"]]
    assert weak, "random weights were meant to be near chance"
    for row in weak:
        assert any(row["query"] in line and "no evidence" in line for line in evaluated["caveats"])


def test_the_page_stands_alone(tiny, evaluated):
    page = (tiny / "report" / "report.html").read_text()
    assert sorted(path.name for path in (tiny / "report").iterdir()) == ["report.html", "report.json"]
    assert not re.search(r"""(src|href)\s*=\s*["']?\s*(https?:)?//""", page)
    assert not re.search(r"""@import|url\(\s*["']?(?!data:)""", page)
    assert "<script" not in page and "<link" not in page
    photos = re.findall(r"data:image/jpeg;base64,([\w+/=]+)", page)
    assert len(photos) == len(evaluated["examples"]) == 12


def test_every_figure_of_the_page_stands_in_report_json(tiny, evaluated):
    page = (tiny / "report" / "report.html").read_text()
    document = json.loads((tiny / "report" / "report.json").read_text())
    photos = re.findall(r"data:image/jpeg;base64,([\w+/=]+)", page)
    assert render_report(document, photos) == page, "made of report.json alone, and of the photos"


def test_a_bundle_of_another_workload_is_refused_and_nothing_is_written(tiny, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text((tiny / "workload.yaml").read_text().replace("id: b", "id: c"))
    with pytest.raises(InputError, match="does not hold the queries"):
        evaluate(tiny / "tiny.safetensors", other, tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_missing_test_data_is_one_line_and_nothing_is_written(tiny, tmp_path, capsys):
    moved = tmp_path / "workload.yaml"
    text = (
        (tiny / "workload.yaml").read_text().replace("weights/", f"{tiny}/weights/").replace("data: data", "data: none")
    )
    moved.write_text(text)
    assert main(["eval", str(tiny / "tiny.safetensors"), str(moved), "-o", str(tmp_path / "report")]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("gemel: ") and "none" in error and "data" in error
    assert not (tmp_path / "report").exists()


def test_a_size_that_is_asked_for_is_compared_too_and_comes_first_in_the_report(tiny, tmp_path):
    told = []
    document = evaluate(
        tiny / "tiny.safetensors", tiny / "workload.yaml", tmp_path, EvalOptions(seeds=1, memory="512MiB"),
        progress=lambda event, **fields: told.append((event, fields)),
    )  # fmt: skip
    assert document["asked"] == {"memory": "512MiB", "memory_bytes": 512 * 2**20}
    assert {row["memory"] for row in document["streaming"]} == {"min", "50%", "75%", "512MiB"}
    assert "judged with 512.0 MiB" in (tmp_path / "report.html").read_text()
    assert told[0] == ("stages", {"names": ["judging each query on test", "playing the streams", "writing the report"]})


def test_both_models_answer_on_a_card_as_they_do_here(tiny, tmp_path, monkeypatch, evaluated):
    with a_card(monkeypatch) as mixed:
        document = evaluate(tiny / "tiny.safetensors", tiny / "workload.yaml", tmp_path, EvalOptions(seeds=1))
    assert not mixed and document["offline"] == evaluated["offline"]


def test_memory_that_holds_not_even_the_largest_query_is_refused(tiny, tmp_path):
    with pytest.raises(InputError, match="too little"):
        evaluate(tiny / "tiny.safetensors", tiny / "workload.yaml", tmp_path / "report", EvalOptions(memory="1MiB"))
    assert not (tmp_path / "report").exists()


def test_a_failing_write_leaves_the_older_report_whole(tiny, tmp_path, monkeypatch, evaluated):
    import models.io

    folder = tmp_path / "report"
    folder.mkdir()
    (folder / "report.html").write_text("older")
    written = []

    class Full(models.io._Remembering):
        def write(self, data, /):
            written.append(self.name)
            if len(written) == 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    monkeypatch.setattr(models.io, "_Remembering", Full)
    with pytest.raises(InputError, match=r"report\.html: cannot be written: No space left on device; free some space"):
        evaluate(tiny / "tiny.safetensors", tiny / "workload.yaml", folder, EvalOptions(seeds=1))
    assert [path.name for path in folder.iterdir()] == ["report.html"]
    assert (folder / "report.html").read_text() == "older"


def test_simulate_takes_a_bundle_or_its_workload_and_agrees_on_the_memory(tiny, capsys):
    found = []
    for source in ("tiny.safetensors", "workload.yaml"):
        assert main(["simulate", str(tiny / source), "--memory", "min", "--duration", "5", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    merged, originals = found
    assert {"memory_bytes", "queries", "bytes_moved", "swaps"} <= set(merged)
    assert {"id", "received", "processed", "late", "dropped", "age_p95_ms"} <= set(merged["queries"][0])
    assert merged["memory_bytes"] == originals["memory_bytes"]
    assert merged["bytes_moved"] < originals["bytes_moved"]


def test_bundle_show_and_verify_say_what_they_found(tiny, tmp_path, capsys):
    assert main(["bundle", "verify", str(tiny / "tiny.safetensors"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "problems": [], "unchecked": []}
    assert main(["bundle", "show", str(tiny / "tiny.safetensors"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["shared"]) == 4 and [query["id"] for query in shown["queries"]] == ["a", "b"]
    damaged = tmp_path / "damaged.safetensors"
    data = bytearray((tiny / "tiny.safetensors").read_bytes())
    data[random.Random(0).randrange(len(data) // 2, len(data))] ^= 1
    damaged.write_bytes(data)
    assert main(["bundle", "verify", str(damaged), "--json"]) == 1
    refused = json.loads(capsys.readouterr().out)
    assert refused["ok"] is False and len(refused["problems"]) == 1
    assert main(["bundle", "show", str(tmp_path / "absent.safetensors")]) == 2


def test_measured_costs_are_those_of_the_profile_beside_the_bundle(tiny, tmp_path):
    from gemel.profiler import profile_bundle

    with pytest.raises(InputError, match="never measured"):
        evaluate(tiny / "tiny.safetensors", tiny / "workload.yaml", tmp_path, EvalOptions("measured"))
    found = profile_bundle(tiny / "tiny.safetensors", "cpu", rounds=1, engine="torch").profile
    document = evaluate(tiny / "tiny.safetensors", tiny / "workload.yaml", tmp_path, EvalOptions("measured", seeds=1))
    assert not document["device"]["modelled"] and document["device"]["name"] == "measured"
    runs = {(row["arm"], row["query"]): row["run_ms"] for row in document["costs"]}
    assert runs["merged", "a"] == runs["originals", "a"] == pytest.approx(1000 * found.queries["a"].batches[0].run_s)
    (tiny / "tiny.safetensors.profile.json").unlink()


def test_the_three_numbers_of_a_query_stand_side_by_side(evaluated):
    row = next(one for one in evaluated["side_by_side"] if (one["query"], one["memory"]) == ("b", "50%"))
    streamed = {
        one["arm"]: one["accuracy"] for one in evaluated["streaming"] if (one["query"], one["memory"]) == ("b", "50%")
    }
    assert row["merged_offline"] == next(one["merged"] for one in evaluated["offline"] if one["query"] == "b")
    assert (row["merged_streaming"], row["originals_streaming"]) == (streamed["merged"], streamed["originals"])


def test_a_report_says_how_it_came_to_be(evaluated, tiny):
    (command,) = evaluated["commands"]
    assert command.startswith(f"gemel eval {tiny}/tiny.safetensors {tiny}/workload.yaml -o {tiny}/report")
    assert command.endswith("--memory min --seeds 2")
    assert {"python", "torch"} <= evaluated["versions"].keys() and evaluated["settings"]["policy"] == "adaptive"
    recalls = evaluated["offline"][0]["classes"]
    assert [row["class"] for row in recalls] == ["empty", "busy"]
    assert sum(row["merged"] for row in recalls) / 2 == pytest.approx(evaluated["offline"][0]["merged"])


def test_wall_clock_and_virtual_clock_are_told_with_their_difference(tiny, tmp_path):
    asked = EvalOptions(seeds=1, memory="512MiB", wall_s=0.8)
    wall = evaluate(tiny / "tiny.safetensors", tiny / "workload.yaml", tmp_path, asked)["wall"]
    assert [row["query"] for row in wall["queries"]] == ["a", "b"]
    for row in wall["queries"]:
        assert row["difference"] == row["wall"] - row["virtual"]
        assert row["received"] >= row["processed_wall"] > 0 and row["processed_virtual"] > 0 and row["run_ms"] > 0
    assert wall["difference"] == max(abs(row["difference"]) for row in wall["queries"])


@pytest.mark.parametrize("roi", [None, (4.0, 2.0, 12.0, 8.0), (3.6, 2.2, 11.7, 7.9)])
def test_a_frame_that_was_cropped_for_its_query_is_put_back_where_the_box_will_look(roi):
    picture = np.random.default_rng(0).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    assert np.array_equal(crop(paste_into_frame(picture, roi), roi), picture)


def test_the_frames_and_answers_are_handed_over_to_other_tools(tiny, tmp_path):
    folder = tmp_path / "fiftyone"
    evaluate(tiny / "tiny.safetensors", tiny / "workload.yaml", tmp_path / "r", EvalOptions(seeds=1, fiftyone=folder))
    truth = json.loads((folder / "a" / "labels.json").read_text())
    merged = json.loads((folder / "a" / "merged.json").read_text())
    assert truth["classes"] == merged["classes"] == ["empty", "busy"]
    frames = sorted(path.stem for path in (folder / "a" / "data").iterdir())
    assert list(truth["labels"]) == list(merged["labels"]) == frames and len(frames) == 16
    with pytest.raises(InputError, match="--fiftyone: holds other files"):
        evaluate(
            tiny / "tiny.safetensors", tiny / "workload.yaml", tmp_path / "s", EvalOptions(seeds=1, fiftyone=folder)
        )
    assert not (tmp_path / "s").exists()
