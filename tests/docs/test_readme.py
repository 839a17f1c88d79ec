"""The README: one page, and its commands run on a workload."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from PIL import Image

from gemel.cli import main
from tests.docs.pages import REPOSITORY
from tests.edge_runtime.tiny import write_clip
from tests.gemel.screenshot import FIGURES
from tests.merger.tiny import write_random_weights, write_workload
from tests.models.graph.onnx_files import write_classifier

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_readme_is_one_page_with_six_links_and_one_table() -> None:
    assert len(README.split()) <= 600
    links = re.findall(r"\]\((docs/[\w-]+\.md|CONTRIBUTING\.md)\)", README[README.index("Read on:") :])
    assert len(links) == 6 and README.count("<!-- table: ") == 1 and "one copy of the weights" in README


def test_readme_first_table_gives_each_reader_a_row_with_figures_of_docs() -> None:
    rows = [row.strip("|").split("|") for row in README.splitlines() if row.startswith("|")]
    rows = rows[2 : next(at for at, row in enumerate(rows) if row[0].strip() == "way")]
    assert rows[-1][0].strip() == "to decide"
    told = "\n".join(page.read_text(encoding="utf-8") for page in (REPOSITORY / "docs").glob("*.md"))
    for reader in ("ONNX detectors, on one camera", "classifiers, few labels", "Frigate", "GPU servers", "to decide"):
        (row,) = (row for row in rows if reader in row[0])
        figures = re.findall(r"\d[\d.]+", row[1])
        assert figures or "nothing" in row[1], reader
        assert all(re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", told) for figure in figures), reader
        assert re.fullmatch(r" \[[\w ]+\]\(docs/[\w.#-]+\) ", row[2]), reader


def test_figures_of_the_demo_are_those_of_its_record(capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads((REPOSITORY / "benchmarks/measured/transcribed/demo.json").read_text(encoding="utf-8"))
    at = {head: index for index, head in enumerate(record["heads"])}
    shown = json.loads(Image.open(REPOSITORY / "docs/report.png").info[FIGURES])
    columns = [at[head] for head in ("original", "merged", "at least of the original")]
    recorded = {row[at["query"]]: [float(row[column]) for column in columns] for row in record["rows"]}
    assert shown["queries"].keys() == recorded.keys()
    for query, values in recorded.items():  # a demo on another instruction set may differ by so much
        assert shown["queries"][query] == pytest.approx(values, abs=0.02), query
    saved = float(record["saved"])
    assert shown["saved"] == pytest.approx(saved, abs=0.005)
    results = (REPOSITORY / "docs/results.md").read_text(encoding="utf-8")
    assert f"saves {saved:.3f} of all bytes" in results
    assert f"in {record['processor_s']} s of processor time" in results
    assert f"of the demo {1 - saved:.3f} is left" in " ".join(README.split())
    assert main(["demo", "--help"]) == 0
    minutes = {5: "about five minutes"}[round(record["processor_s"] / 60)]
    assert all(minutes in " ".join(text.split()) for text in (README, capsys.readouterr().out))


def test_readme_commands_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_weights(write_workload(tmp_path, frames=12))
    write_clip(tmp_path / "none.mp4", 4)
    box = {"bundle": "box.safetensors", "budget": "64MiB", "engine": "torch", "cameras": {"c": {"source": "none.mp4"}}}
    box |= {"factories": ["tests.merger.tiny:tiny_net"], "sinks": [{"kind": "jsonl", "path": "results.jsonl"}]}
    (tmp_path / "box.yaml").write_text(yaml.safe_dump(box))
    monkeypatch.chdir(tmp_path)
    boxes = [{"id": "north", "device": "jetson-nano", "memory": "64MiB", "count": 2}]
    city = {"name": "city", "boxes": boxes, "workloads": ["workload.yaml"]}
    (tmp_path / "city.yaml").write_text(yaml.safe_dump(city))
    commands = re.findall(r"(?:^    |`)gemel ([^#`\n]+)", README, re.MULTILINE)
    asked = {command.split()[0]: command.split() for command in commands}
    assert asked.keys() == {"init", "pack", "inspect", "train", "merge", "run", "eval", "place"}
    for name in ("gate", "yard", "hall"):
        write_classifier(tmp_path / f"{name}.onnx")
    assert main(asked["pack"]) == 0
    (tmp_path / "box.safetensors").unlink()
    asked["merge"] += ["--method", "none"]  # as quick as it gets
    for name in ("inspect", "train", "merge", "run", "eval", "place"):
        assert main(asked[name]) in (0, 1), name  # untrained originals are no evidence, so a merge may fall short
    assert (tmp_path / "placed" / "placement.json").is_file()
    assert (tmp_path / "results.jsonl").read_text() and (tmp_path / "report" / "report.html").is_file()
