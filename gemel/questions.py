"""Questions to a person: frames on which a merged model and its original differ, and the answers to them, in a file.

At most one frame of a block is shown, drawn at even distances of what the differences may cost, and the number of
questions is fixed before the first answer. A and B are dealt at random, so that no one can favour either model.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from gemel.merger.observe import SAME_IOU, AnswerDifferences
from gemel.merger.proof import JudgedDifferences
from gemel.models.errors import InputError
from gemel.models.files.io import Exact, open_atomic, read_json, validate
from gemel.models.measures.metrics import match_frames
from gemel.models.notes import add_note
from gemel.models.predictions import DetectionPrediction
from gemel.models.tasks import task_of
from gemel.models.tasks.detection import Detection
from gemel.models.workload import Query

SUFFIX = ".answers.json"
"""Appended to the bundle's name."""
MAX_BYTES = 1 << 24
MIN_QUESTIONS, MAX_QUESTIONS = 20, 50
"""Of one query."""
ONE_SIDED = 0.95
"""Part of the answers for A, or for B, above which a note says so."""
HINT = "review again: gemel review BUNDLE WORKLOAD"


class ReviewAnswer(str, Enum):
    """What a person says of one frame."""

    A = "A"
    B = "B"
    NEITHER = "neither"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True)
class ReviewQuestion:
    """One frame on which both models differ.

    `place` is that of the frame among those that prove, `frame` its digest, `a` and `b` what both models answer there
    (texts; boxes as `[class, x0, y0, x1, y1]` in `box`), `a_is_original` which of them is the original's. The question
    stands for `weight` equal parts of all differences.
    """

    query: str
    place: int
    frame: str
    a: str
    b: str
    a_is_original: bool
    weight: float
    box: tuple[float, float, float, float] | None = None
    choice: ReviewAnswer | None = None


class QuestionRow(Exact):
    """A question as the file has it."""

    query: str = Field(max_length=100)
    place: int = Field(ge=0, le=1 << 31)
    frame: str = Field(max_length=64)
    a: str = Field(max_length=1000)
    b: str = Field(max_length=1000)
    a_is_original: bool
    weight: float = Field(gt=0, le=1e6)
    box: list[float] | None = Field(min_length=4, max_length=4)
    choice: Literal["A", "B", "neither", "cannot tell"] | None


class AnswerDocument(Exact):
    """The questions about the bundle of this SHA-256, on this footage by query, drawn with this seed."""

    format: Literal[1] = 1
    bundle: str = Field(max_length=64)
    seed: int = Field(ge=0, le=1 << 32)
    footage: dict[str, str]
    questions: list[QuestionRow] = Field(max_length=100_000)


@dataclass(frozen=True)
class QuestionSheet:
    """All questions about one bundle."""

    bundle: str
    seed: int
    footage: Mapping[str, str]
    questions: tuple[ReviewQuestion, ...] = ()

    def of(self, query: str) -> list[ReviewQuestion]:
        """Those about one query."""
        return [question for question in self.questions if question.query == query]

    @property
    def open(self) -> list[int]:
        """The positions of the questions without an answer."""
        return [place for place, question in enumerate(self.questions) if question.choice is None]

    def answer(self, position: int, choice: ReviewAnswer | None) -> QuestionSheet:
        """The sheet with this answer to the question at a position."""
        questions = list(self.questions)
        questions[position] = replace(questions[position], choice=choice)
        return replace(self, questions=tuple(questions))

    def judge_differences(self, query: str) -> JudgedDifferences | None:
        """The answers about a query for its proof, once there are any; an open question counts as lost."""
        questions = self.of(query)
        if not any(question.choice is not None for question in questions):
            return None
        losses = np.array([_loss(question) for question in questions])
        return JudgedDifferences(losses, np.array([question.weight for question in questions]))


def _loss(question: ReviewQuestion) -> float:
    """1 where the original alone was right or the person could not tell, 0 where the merged model alone was."""
    if question.choice is ReviewAnswer.NEITHER:
        return 0.5
    if question.choice in (None, ReviewAnswer.CANNOT_TELL):
        return 1.0
    is_original_right = (question.choice is ReviewAnswer.A) == question.a_is_original
    is_lost = (question.b if question.a_is_original else question.a) == NOTHING
    if is_lost and not is_original_right:
        return 0.5  # what the original found is no object: to drop it gains less than to find one
    return float(is_original_right)


NOTHING = "nothing"
"""The answer of a detector that finds no object where the other does."""


def draw_places(costs: np.ndarray, blocks: Sequence[int], count: int, seed: int) -> list[tuple[int, float]]:
    """Frames to ask about, with what each stands for: at even distances of their costs (N,), at most one a block."""
    total = float(costs.sum())
    if total <= 0:
        return []
    start = random.Random(seed).random()
    ends = np.cumsum(costs)
    points = [(start + number) * total / count for number in range(count)]
    places = [min(int(np.searchsorted(ends, point, side="right")), len(costs) - 1) for point in points]
    by_block: dict[int, tuple[int, float]] = {}
    for place in places:
        first, weight = by_block.get(blocks[place], (place, 0.0))
        by_block[blocks[place]] = (first, weight + 1.0)
    return [by_block[block] for block in sorted(by_block)]


def price_frames(differences: AnswerDifferences) -> np.ndarray:
    """What each frame's differences may cost (N,): of a class, in parts of its answers; of objects, their number."""
    shown = np.maximum(1.0, differences.shown.sum(axis=0))
    costs = (differences.differ / shown).sum(axis=1)
    if differences.added is not None:
        costs = costs + 0.5 * (differences.added / shown).sum(axis=1)
    return costs


def find_object(
    query: Query, before: DetectionPrediction, after: DetectionPrediction, threshold: float
) -> tuple[str, str, tuple[float, float, float, float]]:
    """An object that one model finds and the other does not: what the original says, what the merged model, its box.

    Objects of the original that are lost come first.
    """
    task = task_of(query)
    assert isinstance(task, Detection)
    sides = [task.labels_of(side, threshold) for side in (before, after)]
    for own, other, is_lost in ((sides[0], sides[1], True), (sides[1], sides[0], False)):
        for place, (name, box) in enumerate(zip(own.classes, own.boxes, strict=True)):
            alone = DetectionPrediction((name,), (1.0,), (box,), outlines=own.outlines[place : place + 1])
            if not match_frames([alone], [other], task.overlaps, SAME_IOU).hits.any():
                return (name, NOTHING, box) if is_lost else (NOTHING, name, box)
    raise ValueError("the models do not differ on this frame")


def digest_frame(picture: np.ndarray) -> str:
    """What tells frames apart."""
    return hashlib.sha256(picture.tobytes()).hexdigest()


def answers_path(bundle: Path) -> Path:
    """The file of the answers about a bundle."""
    return Path(f"{bundle}{SUFFIX}")


def read_sheet(path: Path) -> QuestionSheet:
    """The questions of a file; InputError for a malformed one."""
    document = validate(path, read_json(path, HINT, MAX_BYTES), AnswerDocument, hint=HINT)
    questions = tuple(
        ReviewQuestion(
            row.query, row.place, row.frame, row.a, row.b, row.a_is_original, row.weight,
            None if row.box is None else (row.box[0], row.box[1], row.box[2], row.box[3]),
            None if row.choice is None else ReviewAnswer(row.choice),
        )
        for row in document.questions
    )  # fmt: skip
    return QuestionSheet(document.bundle, document.seed, document.footage, questions)


def write_sheet(path: Path, sheet: QuestionSheet) -> None:
    """Write questions and answers; InputError where that fails."""
    rows = [{**asdict(question), "box": question.box and list(question.box)} for question in sheet.questions]
    document = {"format": 1, "bundle": sheet.bundle, "seed": sheet.seed, "footage": dict(sheet.footage)}
    with open_atomic(path, overwrite=True) as file:
        file.write(json.dumps({**document, "questions": rows}, indent=1).encode())


def carry_answers(sheet: QuestionSheet, earlier: QuestionSheet) -> QuestionSheet:
    """The sheet with the answers of another one to the same questions: the same frame, the same two answers.

    InputError where that file contradicts itself.
    """
    known: dict[tuple[str, str, frozenset[str]], str] = {}
    for question in earlier.questions:
        if question.choice is None:
            continue
        key = _key(question)
        right = _right_answer(question)
        if known.setdefault(key, right) != right:
            problem = f"two answers about one frame of query {question.query} contradict each other"
            raise InputError("--answers", problem, "take one of them out")
    questions = []
    for question in sheet.questions:
        right = known.get(_key(question))
        if question.choice is None and right is not None:
            sides = {question.a: ReviewAnswer.A, question.b: ReviewAnswer.B}
            question = replace(question, choice=sides.get(right) or ReviewAnswer(right))
        questions.append(question)
    return replace(sheet, questions=tuple(questions))


def _key(question: ReviewQuestion) -> tuple[str, str, frozenset[str]]:
    return question.query, question.frame, frozenset((question.a, question.b))


def _right_answer(question: ReviewQuestion) -> str:
    """The answer that the person called right; or `neither`, `cannot tell`."""
    if question.choice is ReviewAnswer.A:
        return question.a
    if question.choice is ReviewAnswer.B:
        return question.b
    assert question.choice is not None
    return question.choice.value


def note_one_sided(sheet: QuestionSheet) -> None:
    """Tell a reviewer who takes one side always: no pair of models is dealt so unevenly."""
    choices = [question.choice for question in sheet.questions if question.choice in (ReviewAnswer.A, ReviewAnswer.B)]
    for side in (ReviewAnswer.A, ReviewAnswer.B):
        if len(choices) >= MIN_QUESTIONS and choices.count(side) > ONE_SIDED * len(choices):
            text = (
                f"{choices.count(side)} of {len(choices)} answers are {side.value}, though sides were dealt at random"
            )
            add_note("answers", text, "look at the frames again")
