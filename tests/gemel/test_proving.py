"""`gemel prove` and `gemel review`: what footage leaves open is decided by answers to frames on which models differ."""

from __future__ import annotations

import asyncio
import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from aiohttp import ClientSession
from torch import nn

from gemel import review
from gemel.cli import main
from gemel.merger import MergeOptions, TrainOptions, merge, train_originals
from gemel.merger.observe import AnswerDifferences
from gemel.models.bundle import BundleQuery, Made, write_bundle
from gemel.models.errors import InputError
from gemel.models.files.weights import load_weights
from gemel.models.workload import Workload, load_workload
from gemel.models.zoo import build_query
from gemel.proof_file import find_proofs, proof_path
from gemel.proving import BundleTrial, find_sheet
from gemel.questions import (
    NOTHING,
    QuestionSheet,
    ReviewAnswer,
    ReviewQuestion,
    answers_path,
    carry_answers,
    draw_places,
    note_one_sided,
    price_frames,
    read_sheet,
    write_sheet,
)
from gemel.review import ReviewServer, open_review, read_table, write_folder
from tests.merger.footage import add_footage
from tests.merger.tiny import write_workload

CLIPS = 220
NOISE = 0.35
"""Of the head of a model that answers otherwise on some frames."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained query with footage, `same.safetensors` and `other.safetensors`, whose head was moved."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("proving")
    load = load_workload(write_workload(folder, queries=1))
    train_originals(load, seed=0, options=TrainOptions(rate=3e-3, passes=360, max_cycles=1))
    load = add_footage(load, CLIPS)
    merge(load, folder / "same.safetensors", "none", options=MergeOptions(weights="fp32"))
    write_moved(load, folder / "other.safetensors")
    return folder


def write_moved(load: Workload, path: Path) -> None:
    """The original with another bias: of two answers one is given more often."""
    (query,) = load.queries
    model = build_query(query)
    load_weights(query, model)
    trial = BundleTrial(path.with_name("same.safetensors"), load)
    answers = trial.data.footage_answers[query.id]
    odds = sorted(float(np.log(one.probabilities[1] / one.probabilities[0])) for one in answers)  # type: ignore[union-attr]
    above = [value for value in odds if value > 0]
    head = next(module for module in model.modules() if isinstance(module, nn.Linear))
    with torch.no_grad():
        head.bias[0] += above[len(above) // 25]  # about a fiftieth of all answers turn
    write_bundle(path, {query.id: model.eval()}, [BundleQuery.of(query)], Made(load.name, "none", 0))


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict]:
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_prove_of_the_originals_says_unchanged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = folder / "same.safetensors"
    code, document = run(["prove", str(bundle), str(folder / "workload.yaml")], capsys)
    (row,) = document["queries"]
    assert (code, row["state"], row["proven"], row["lower_end"]) == (0, "unchanged", False, None)
    assert find_proofs(BundleTrial(bundle, folder / "workload.yaml").bundle)["q0"]["state"] == "unchanged"


def test_answers_prove_what_footage_leaves_open(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, workload = folder / "other.safetensors", folder / "workload.yaml"
    code, document = run(["prove", str(bundle), str(workload)], capsys)
    (row,) = document["queries"]
    assert (code, row["proven"]) == (1, False) and 0.9 < row["answers_kept"] < 1.0
    asked = open_review(bundle, workload)
    count = len(asked.sheet.questions)
    assert count and len(asked.pictures) == count and asked.pictures[0][:2] == b"\xff\xd8"
    assert {question.a_is_original for question in asked.sheet.questions} == {True, False}
    table = write_folder(asked, tmp_path / "pictures")
    rows = list(csv.DictReader(table.open(encoding="utf-8")))
    assert len(rows) == count and (tmp_path / "pictures" / rows[0]["picture"]).is_file()
    for number, row in enumerate(rows):  # as often the one as the other
        is_first = asked.sheet.questions[number].a_is_original
        row["answer"] = "A" if is_first == (number % 2 == 0) else "b"
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    assert main(["review", str(bundle), str(workload), "--table", str(table)]) == 0
    assert f"{count} of {count} answered" in capsys.readouterr().out
    _, document = run(["prove", str(bundle), str(workload)], capsys)
    (row,) = document["queries"]
    judged = find_sheet(BundleTrial(bundle, workload).bundle, None)
    assert judged is not None and not judged.open
    assert row["lower_end"] > 0.9 and (row["from"] == "answers") is row["proven"]
    assert main(["bundle", "show", str(bundle)]) == 0
    assert ("proven: at least" if row["proven"] else "not proven: needs") in capsys.readouterr().out


def test_damaged_proof_is_ignored(folder: Path) -> None:
    bundle = BundleTrial(folder / "same.safetensors", folder / "workload.yaml").bundle
    path = proof_path(bundle.path)
    kept = path.read_bytes() if path.exists() else None
    path.write_text("{")
    assert find_proofs(bundle) == {}
    path.unlink() if kept is None else path.write_bytes(kept)


def test_page_keeps_each_answer_and_refuses_strangers(folder: Path, tmp_path: Path) -> None:
    asked = open_review(folder / "other.safetensors", folder / "workload.yaml")
    path = tmp_path / "answers.json"
    write_sheet(path, asked.sheet)
    asked = replace(asked, path=path)

    async def answer() -> QuestionSheet:
        server, shown = ReviewServer(asked), asyncio.get_running_loop().create_future()
        serving = asyncio.ensure_future(server.run(0, shown.set_result))
        address = await shown
        async with ClientSession() as client:
            page = await (await client.get(address)).text()
            assert "Which is right?" in page and "http" not in re.sub(r"<!doctype.*?>", "", page)
            state = await (await client.get(f"{address}state")).json()
            assert len(state["questions"]) == len(asked.sheet.questions) and "a_is_original" not in json.dumps(state)
            picture = await client.get(f"{address}frames/0.jpg")
            assert picture.headers["Content-Type"] == "image/jpeg"
            sent = await client.post(f"{address}answers", json={"position": 0, "choice": "neither"})
            assert sent.status == 200 and read_sheet(path).questions[0].choice is ReviewAnswer.NEITHER
            for wrong in ({"position": 0, "choice": "C"}, {"position": 10**6, "choice": "A"}, {"choice": "A"}):
                assert (await client.post(f"{address}answers", json=wrong)).status == 400
            form = await client.post(f"{address}answers", data={"position": "0"})
            assert form.status == 415
            elsewhere = await client.get(address, headers={"Host": "evil.example"})
            assert elsewhere.status == 403
            guessed = await client.get(address.rsplit("/", 2)[0] + "/other/")
            assert guessed.status == 404
            assert (await client.post(f"{address}done", json={})).status == 200
        return (await serving).sheet

    assert asyncio.run(answer()).questions[0].choice is ReviewAnswer.NEITHER


def question(**keys: object) -> ReviewQuestion:
    return replace(ReviewQuestion("q", 3, "f" * 64, "busy", "empty", True, 1.0), **keys)  # type: ignore[arg-type]


def test_answers_become_losses() -> None:
    choices = [ReviewAnswer.A, ReviewAnswer.B, ReviewAnswer.NEITHER, ReviewAnswer.CANNOT_TELL, None]
    sheet = QuestionSheet("b", 0, {}, tuple(question(choice=choice) for choice in choices))
    judged = sheet.judge_differences("q")
    assert judged is not None and judged.losses.tolist() == [1.0, 0.0, 0.5, 1.0, 1.0]
    assert QuestionSheet("b", 0, {}, (question(),)).judge_differences("q") is None, "nothing was answered"
    lost = question(a="car", b=NOTHING, box=(0.0, 0.0, 9.0, 9.0))
    added = question(a=NOTHING, b="car", box=(0.0, 0.0, 9.0, 9.0))
    sheet = QuestionSheet(
        "b",
        0,
        {},
        tuple(replace(one, choice=side) for one in (lost, added) for side in (ReviewAnswer.A, ReviewAnswer.B)),
    )
    judged = sheet.judge_differences("q")
    assert judged is not None and judged.losses.tolist() == [1.0, 0.5, 1.0, 0.0]


def test_questions_lie_at_even_costs_with_one_a_block() -> None:
    costs, blocks = np.zeros(1000), [place // 10 for place in range(1000)]
    costs[::5] = 1.0
    drawn = draw_places(costs, blocks, 20, seed=0)
    assert len(drawn) == 20 == len({blocks[place] for place, _ in drawn}) and {weight for _, weight in drawn} == {1.0}
    assert all(costs[place] for place, _ in drawn)
    lumped = draw_places(np.where(np.arange(1000) < 10, 1.0, 0.0), blocks, 20, seed=0)
    assert [weight for _, weight in lumped] == [20.0], "one block stands for all of them"
    assert draw_places(np.zeros(5), range(5), 20, seed=0) == []


def test_prices_weigh_rare_classes_and_objects_that_were_added() -> None:
    shown, differ = np.array([[1.0, 0], [1, 0], [0, 1]]), np.array([[1.0, 0], [0, 0], [0, 1]])
    assert price_frames(AnswerDifferences(shown, differ)).tolist() == [0.5, 0.0, 1.0]
    objects = AnswerDifferences(np.array([[2.0], [2]]), np.array([[1.0], [0]]), np.array([[0.0], [2]]))
    assert price_frames(objects).tolist() == [0.25, 0.25]


def test_answers_of_another_bundle_answer_equal_questions() -> None:
    earlier = QuestionSheet(
        "old", 0, {}, (question(choice=ReviewAnswer.A), question(frame="e" * 64, choice=ReviewAnswer.NEITHER))
    )
    turned = question(a="empty", b="busy", a_is_original=False)
    sheet = QuestionSheet("new", 0, {}, (turned, question(frame="e" * 64), question(frame="d" * 64)))
    choices = [one.choice for one in carry_answers(sheet, earlier).questions]
    assert choices == [ReviewAnswer.B, ReviewAnswer.NEITHER, None]


def test_answers_that_contradict_each_other_are_refused() -> None:
    earlier = QuestionSheet("old", 0, {}, (question(choice=ReviewAnswer.A), question(choice=ReviewAnswer.B)))
    with pytest.raises(InputError, match="contradict"):
        carry_answers(QuestionSheet("new", 0, {}, (question(),)), earlier)


def test_reviewer_who_takes_one_side_always_is_told(caplog: pytest.LogCaptureFixture) -> None:
    note_one_sided(QuestionSheet("b", 0, {}, tuple(question(choice=ReviewAnswer.A) for _ in range(25))))
    assert "25 of 25 answers are A" in caplog.text


def test_table_of_another_review_or_with_another_word_is_refused(folder: Path, tmp_path: Path) -> None:
    asked = replace(open_review(folder / "other.safetensors", folder / "workload.yaml"), path=tmp_path / "answers.json")
    table = write_folder(asked, tmp_path / "pictures")
    table.write_text(table.read_text().replace("\n", "x\n", 2).replace(",x", ",perhaps"))
    with pytest.raises(InputError):
        read_table(asked, table)
    (tmp_path / "short.csv").write_text("number,query,picture,A,B,answer\n")
    with pytest.raises(InputError, match="has 0 rows"):
        read_table(asked, tmp_path / "short.csv")


def test_answers_file_of_another_bundle_alone_is_refused(folder: Path, tmp_path: Path) -> None:
    write_sheet(tmp_path / "a.json", QuestionSheet("old", 0, {}, (question(choice=ReviewAnswer.A),)))
    bundle = BundleTrial(folder / "same.safetensors", folder / "workload.yaml").bundle
    answers_path(bundle.path).unlink(missing_ok=True)
    with pytest.raises(InputError, match="is about another bundle"):
        find_sheet(bundle, tmp_path / "a.json")


def test_review_of_nothing_asks_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["review", str(folder / "same.safetensors"), str(folder / "workload.yaml")]) == 0
    assert "nothing to ask" in capsys.readouterr().out
    assert review.TABLE == "answers.csv"
