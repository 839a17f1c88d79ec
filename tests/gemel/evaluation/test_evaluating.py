"""`gemel eval`: the keys of its report, equal bytes for both arms, and a ledger that adds up."""

import errno
import json
import os
import random
import re

import pytest
import torch

from gemel.cli import main
from gemel.evaluation.evaluating import evaluate
from models.bundle import BundleQuery, Made, open_bundle, write_bundle
from models.errors import InputError
from models.sharing.groups import ceiling_bytes, groups
from models.sharing.layers import layers_of_all
from models.sharing.plan import SharingPlan, tie
from models.weights.reading import save_weights
from models.workload import load_workload
from models.zoo import build


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, write_tiny):
    """A workload of two small classifiers with random weights, and a bundle in which they share half of them."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("tiny")
    workload = load_workload(write_tiny(root))
    (root / "weights").mkdir()
    models = {}
    for query in workload.queries:
        model = build(query.model, query.classes, query.model_args, query.input_size, query.task)
        save_weights(root / "weights" / f"{query.id}.safetensors", model.state_dict())
        models[query.id] = model
    layers = layers_of_all(workload.queries)
    tie(models, SharingPlan.of(groups(layers)[:4]))
    records = [BundleQuery.of(query) for query in workload.queries]
    write_bundle(root / "tiny.safetensors", models, records, Made("tiny", "gemel", ceiling_bytes(layers)))
    return root


@pytest.fixture(scope="module")
def evaluated(tiny):
    return evaluate(tiny / "tiny.safetensors", tiny / "workload.yaml", tiny / "report", seeds=2)


def test_the_report_has_every_key_that_the_design_promises(evaluated, tiny):
    assert {"offline", "streaming", "ledger"} <= set(evaluated)
    keys = {"arm", "memory", "memory_bytes", "query", "metric", "accuracy", "age_p95_ms", "spread"}
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
    parts = sum(row["private"] + row["shared_part"] + row["residual"] for row in counts["queries"])
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
    assert page.count("data:image/jpeg;base64,") == 2


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
        tiny / "tiny.safetensors", tiny / "workload.yaml", tmp_path, seeds=1, memory="512MiB",
        progress=lambda event, **fields: told.append((event, fields)),
    )  # fmt: skip
    assert document["asked"] == {"memory": "512MiB", "memory_bytes": 512 * 2**20}
    assert {row["memory"] for row in document["streaming"]} == {"min", "50%", "75%", "512MiB"}
    assert "judged with 512.0 MiB" in (tmp_path / "report.html").read_text()
    assert told[0] == ("stages", {"names": ["judging each query on test", "playing the streams", "writing the report"]})


def test_memory_that_holds_not_even_the_largest_query_is_refused(tiny, tmp_path):
    with pytest.raises(InputError, match="too little"):
        evaluate(tiny / "tiny.safetensors", tiny / "workload.yaml", tmp_path / "report", memory="1MiB")
    assert not (tmp_path / "report").exists()


def test_a_failing_write_leaves_the_older_report_whole(tiny, tmp_path, monkeypatch, evaluated):
    import models.files.atomic

    folder = tmp_path / "report"
    folder.mkdir()
    (folder / "report.html").write_text("older")
    written = []

    class Full(models.files.atomic._Remembering):
        def write(self, data, /):
            written.append(self.name)
            if len(written) == 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    monkeypatch.setattr(models.files.atomic, "_Remembering", Full)
    with pytest.raises(InputError, match=r"report\.html: cannot be written: No space left on device; free some space"):
        evaluate(tiny / "tiny.safetensors", tiny / "workload.yaml", folder, seeds=1)
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
