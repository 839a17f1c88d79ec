"""`gemel review`: a person says which of two models is right on frames where they differ.

Twenty to fifty frames of each query that is not proven, on a page on this machine (keys 1 to 4), or as a folder of
pictures and a table for a machine without a browser. The answers lie beside the bundle, for `gemel prove`.
"""

from __future__ import annotations

import asyncio
import csv
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from aiohttp import web

from gemel.merger.needs import find_needs
from gemel.merger.proof import prove_queries
from gemel.models.errors import InputError
from gemel.models.files.io import open_atomic
from gemel.models.footage import FOOTAGE
from gemel.models.notes import add_note
from gemel.models.tasks import task_of
from gemel.models.tasks.detection import Detection
from gemel.models.workload import Workload
from gemel.proving import BundleTrial, ComparedQuery
from gemel.questions import (
    MAX_QUESTIONS,
    QuestionSheet,
    ReviewAnswer,
    ReviewQuestion,
    answers_path,
    carry_answers,
    digest_frame,
    draw_places,
    find_object,
    note_one_sided,
    price_frames,
    read_sheet,
    write_sheet,
)

TABLE, COLUMNS = "answers.csv", ("number", "query", "picture", "A", "B", "answer")
WORDS = ", ".join(choice.value for choice in ReviewAnswer)
MAX_SIDE, JPEG_QUALITY = 960, 88
"""Of the pictures that a person sees, in pixels."""
BOX_COLOUR = (255, 176, 0)
POLL_S = 0.2


@dataclass(frozen=True)
class Review:
    """A sheet of questions with a picture of each (JPEG), and the file that keeps it."""

    sheet: QuestionSheet
    pictures: tuple[bytes, ...]
    path: Path

    def to_json(self) -> dict[str, Any]:
        """The keys of `gemel review --json`."""
        counts = {name: len(self.sheet.of(name)) for name in dict.fromkeys(one.query for one in self.sheet.questions)}
        return {
            "answers": str(self.path), "questions": len(self.sheet.questions), "open": len(self.sheet.open),
            "queries": [{"id": name, "questions": count} for name, count in counts.items()],
        }  # fmt: skip

    def to_text(self) -> str:
        """How far the answers are, and the next step."""
        count = len(self.sheet.questions)
        if not count:
            return "nothing to ask: every query is proven or unchanged, or differs on no frame"
        return f"{self.path}: {count - len(self.sheet.open)} of {count} answered; now run `gemel prove`"


def open_review(
    bundle: str | Path, workload: str | Path | Workload, answers: str | Path | None = None, seed: int = 0
) -> Review:
    """The questions about a bundle: those beside it, or new ones; `answers` of another bundle answer equal questions.

    Raises InputError as `gemel.proving.prove_bundle`, and for queries of a task whose answers have no text.
    """
    trial = BundleTrial(bundle, workload)
    path = answers_path(trial.bundle.path)
    compared = {query.id: one for query in trial.workload.queries if (one := trial.compare(query)) is not None}
    sheet = read_sheet(path) if path.exists() else None
    if sheet is None or sheet.bundle != trial.bundle.digest:
        sheet = draw_sheet(trial, compared, seed)
    if answers is not None:
        sheet = carry_answers(sheet, read_sheet(Path(answers)))
    pictures = tuple(_picture(trial, question) for question in sheet.questions)
    write_sheet(path, sheet)
    return Review(sheet, pictures, path)


def draw_sheet(trial: BundleTrial, compared: dict[str, ComparedQuery], seed: int) -> QuestionSheet:
    """Questions about each query that agreement and labels do not prove, their number fixed now."""
    errors = {name: trial.looks.error(name, one.data, one.model) for name, one in compared.items()}
    proofs = prove_queries({name: one.observed for name, one in compared.items()}, errors)
    questions = list[ReviewQuestion]()
    for name, one in compared.items():
        if proofs[name].proven or one.differences is None or not len(one.differences.places):
            continue
        if not _has_texts(one):
            add_note(
                name, f"answers of the task {one.query.task} cannot be shown side by side", "add labels or footage"
            )
            continue
        needs = find_needs(one.observed, proofs[name].error, FOOTAGE.block_s)
        questions += _draw_questions(trial, one, needs.answers or MAX_QUESTIONS, seed)
    footage = {name: one.data for name, one in compared.items()}
    return QuestionSheet(trial.bundle.digest, seed, footage, tuple(questions))


def _has_texts(compared: ComparedQuery) -> bool:
    single = compared.query.task == "classification" and not compared.query.multi_label
    return single or isinstance(task_of(compared.query), Detection)


def _draw_questions(trial: BundleTrial, compared: ComparedQuery, count: int, seed: int) -> list[ReviewQuestion]:
    name, proof, differences = compared.query.id, trial.data.footage[compared.query.id], compared.differences
    assert proof is not None and differences is not None
    dealt = random.Random(f"{seed} {name}")
    questions = []
    for place, weight in draw_places(price_frames(differences), proof.blocks, count, seed):
        if compared.query.task == "classification":
            before, after, box = compared.before[place].label, compared.after[place].label, None  # type: ignore[union-attr]
        else:
            sides = compared.before[place], compared.after[place]
            before, after, box = find_object(compared.query, *sides, compared.threshold)  # type: ignore[arg-type]
        is_first = dealt.random() < 0.5
        frame = digest_frame(proof.frames.split.frames[proof.places[place]])
        first, second = (before, after) if is_first else (after, before)
        questions.append(ReviewQuestion(name, place, frame, first, second, is_first, weight, box))
    return questions


def _picture(trial: BundleTrial, question: ReviewQuestion) -> bytes:
    """The frame of a question as JPEG, with the box of its object; the same for A and B."""
    proof = trial.data.footage[question.query]
    assert proof is not None
    frame = np.ascontiguousarray(proof.frames.split.frames[proof.places[question.place]])
    if question.box is not None:
        x0, y0, x1, y1 = (round(edge) for edge in question.box)
        cv2.rectangle(frame, (x0, y0), (x1, y1), BOX_COLOUR, max(2, frame.shape[1] // 300))
    scale = min(1.0, MAX_SIDE / max(frame.shape[:2]))
    if scale < 1:
        frame = cv2.resize(frame, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    turned = cv2.cvtColor(frame, cv2.COLOR_RGB2BGR)
    return cv2.imencode(".jpg", turned, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1].tobytes()


def write_folder(review: Review, folder: str | Path) -> Path:
    """The pictures and a table to fill in, for a machine without a browser; the table's path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / TABLE
    with open_atomic(table) as file:
        lines = [COLUMNS]
        for number, (question, picture) in enumerate(zip(review.sheet.questions, review.pictures, strict=True), 1):
            name = f"{number:03d}.jpg"
            (folder / name).write_bytes(picture)
            choice = "" if question.choice is None else question.choice.value
            lines.append((str(number), question.query, name, question.a, question.b, choice))
        file.write("".join(",".join(map(_quote, line)) + "\r\n" for line in lines).encode())
    return table


def _quote(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"\r\n') else text


def read_table(review: Review, table: str | Path) -> Review:
    """The review with the answers of a filled-in table; InputError for another table or another word."""
    table, sheet = Path(table), review.sheet
    with open(table, encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    if len(rows) != len(sheet.questions) or any(set(COLUMNS) - set(row) for row in rows):
        problem = f"has {len(rows)} rows, {len(sheet.questions)} questions were asked"
        raise InputError(table, problem, "give the table that `gemel review --folder` wrote")
    for position, row in enumerate(rows):
        word = row["answer"].strip()
        if not word:
            continue
        try:
            choice = next(one for one in ReviewAnswer if one.value.lower() == word.lower())
        except StopIteration:
            raise InputError(table, f"row {position + 1} has the answer '{word}'", f"write {WORDS}") from None
        sheet = sheet.answer(position, choice)
    note_one_sided(sheet)
    write_sheet(review.path, sheet)
    return replace(review, sheet=sheet)


class ReviewServer:
    """The page on this machine: a question at a time; each answer is written at once."""

    def __init__(self, review: Review) -> None:
        self.review = review
        self._secret = secrets.token_urlsafe(16)
        self._is_done = asyncio.Event()
        app = web.Application(middlewares=[self._check_host])
        root = f"/{self._secret}"
        app.add_routes([
            web.get(f"{root}/", self._page), web.get(f"{root}/state", self._state),
            web.get(f"{root}/frames/{{number:[0-9]+}}.jpg", self._frame), web.post(f"{root}/answers", self._answer),
            web.post(f"{root}/done", self._done),
        ])  # fmt: skip
        self._runner = web.AppRunner(app, access_log=None)
        self.address = ""

    async def run(self, port: int, show: Callable[[str], None]) -> Review:
        """Serve until the person is done; `show` gets the address of the page."""
        await self._runner.setup()
        try:
            site = web.TCPSite(self._runner, "127.0.0.1", port)
            try:
                await site.start()
            except OSError as error:
                raise InputError("--port", f"{port} is taken: {error.strerror}", "give another one, or 0") from error
            bound = self._runner.addresses[0][1]
            self.address = f"http://127.0.0.1:{bound}/{self._secret}/"
            show(self.address)
            await self._is_done.wait()
            await asyncio.sleep(POLL_S)  # the page gets the answer to its last request
        finally:
            await self._runner.cleanup()
        note_one_sided(self.review.sheet)
        return self.review

    @web.middleware
    async def _check_host(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        """Refuse other names for this machine: a page elsewhere may lead a browser here under its own."""
        if request.host.rsplit(":", 1)[0] not in ("127.0.0.1", "localhost"):
            raise web.HTTPForbidden
        return await handler(request)

    async def _page(self, request: web.Request) -> web.Response:
        page = resources.files("gemel").joinpath("review.html").read_text(encoding="utf-8")
        return web.Response(text=page, content_type="text/html", headers={"Cache-Control": "no-store"})

    async def _state(self, request: web.Request) -> web.Response:
        rows = [
            {"query": one.query, "a": one.a, "b": one.b, "choice": one.choice and one.choice.value}
            for one in self.review.sheet.questions
        ]
        return web.json_response({"questions": rows})

    async def _frame(self, request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        if number >= len(self.review.pictures):
            raise web.HTTPNotFound
        return web.Response(body=self.review.pictures[number], content_type="image/jpeg")

    async def _answer(self, request: web.Request) -> web.Response:
        if request.content_type != "application/json":  # no form of another page sends this unasked
            raise web.HTTPUnsupportedMediaType
        try:
            given = await request.json()
            position, word = int(given["position"]), given["choice"]
            choice = None if word is None else ReviewAnswer(word)
            if not 0 <= position < len(self.review.sheet.questions):
                raise ValueError
        except (ValueError, TypeError, KeyError):
            raise web.HTTPBadRequest from None
        sheet = self.review.sheet.answer(position, choice)
        write_sheet(self.review.path, sheet)
        self.review = replace(self.review, sheet=sheet)
        return web.json_response({"open": len(sheet.open)})

    async def _done(self, request: web.Request) -> web.Response:
        self._is_done.set()
        return web.json_response({})


def serve_review(review: Review, port: int, show: Callable[[str], None]) -> Review:
    """Serve the page until the person is done; the review with the answers."""

    async def serve() -> Review:
        return await ReviewServer(review).run(port, show)

    return asyncio.run(serve())
