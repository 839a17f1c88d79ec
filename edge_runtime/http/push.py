"""Frames by HTTP in the two forms that clients speak: DeepStack's (also CodeProject.AI's), and KServe's v2 (Triton)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs

from aiohttp import hdrs, web

from gemel.edge_runtime.capture.push import STOPPED, PushDeclined, PushQuery, Records, UnfitFrame
from gemel.edge_runtime.events.stage import OFF
from gemel.edge_runtime.frames.queues import DEADLINE, FAILED, MEMORY, OVERLOAD, PAUSED, RELOADED, REPLACED
from gemel.edge_runtime.http.auth import Access
from gemel.edge_runtime.http.bodies import (
    BODY_TIMEOUT_S,
    MAX_BODY_BYTES,
    BodyRoom,
    PushError,
    UnprovenTurns,
    too_large,
    too_slow,
)
from gemel.edge_runtime.http.forms import KEY_FIELD, MAX_FIELDS, Form, FormReader
from gemel.edge_runtime.http.kserve import (
    EXTENSIONS,
    InferRequest,
    describe_config,
    describe_model,
    describe_statistics,
    infer_response,
    parse_infer,
)
from gemel.models.errors import InputError
from gemel.models.files.pictures import PUSHED_FORMATS, decode_picture
from gemel.models.tasks import task_of

if TYPE_CHECKING:
    import numpy as np

    from gemel.edge_runtime.life.live_status import RuntimeStatus

PARSERS = 2
"""Threads that parse requests, apart from those that draw frames."""
RETRY_AFTER_S = "1"
STATUSES = {
    OVERLOAD: (429, "too many of its frames wait"), REPLACED: (429, "newer frames came while it waited"),
    DEADLINE: (429, "it could not be answered in time"), MEMORY: (429, "there is no memory for its frames"),
    PAUSED: (503, "it fails at present"), RELOADED: (503, "the box has reloaded its config"),
    STOPPED: (503, "the box stops"), OFF: (503, "it is off, by its hours or a switch"),
    FAILED: (500, "it failed on the frame"),
}  # fmt: skip
"""Status and text for the reason of a frame without an answer."""
MODEL, VERSION = "/v2/models/{id}", "/versions/{version}"
"""The path of a query as a model, which clients may follow by a version."""

Value = TypeVar("Value")
Handler = Callable[["PushApi", web.Request], Awaitable[web.Response]]


def _form_error(error: PushError) -> web.Response:
    return _error_response(error, {"success": False, "error": error.text, "code": error.status})


def _infer_error(error: PushError) -> web.Response:
    return _error_response(error, {"error": error.text})


def _error_response(error: PushError, document: Mapping[str, Any]) -> web.Response:
    headers = {hdrs.RETRY_AFTER: RETRY_AFTER_S} if error.status in (429, 503) else {}
    headers |= {hdrs.WWW_AUTHENTICATE: "Bearer"} if error.status == 401 else {}
    return web.Response(
        status=error.status, text=json.dumps(document), content_type="application/json", headers=headers
    )


def _reply_errors(respond: Callable[[PushError], web.Response], handler: Handler) -> Handler:
    @wraps(handler)
    async def answer(api: PushApi, request: web.Request) -> web.Response:
        try:
            return await handler(api, request)
        except PushError as error:
            return respond(error)

    return answer


_reply_form = partial(_reply_errors, _form_error)
"""A handler whose errors have DeepStack's form."""
_reply_infer = partial(_reply_errors, _infer_error)
"""A handler whose errors have KServe's form."""


class PushApi:
    """The handlers of both forms; `access` gives the present token, `is_proven` tells whether a head shows it."""

    def __init__(
        self, source: RuntimeStatus, access: Callable[[], Access], is_proven: Callable[[web.Request], bool]
    ) -> None:
        self._source, self._access, self._is_proven = source, access, is_proven
        self._room, self._turns = BodyRoom(), UnprovenTurns()
        self._parsers = ThreadPoolExecutor(PARSERS, thread_name_prefix="http-parse")

    def close(self) -> None:
        """End the threads that parse; what waits for them is dropped."""
        self._parsers.shutdown(wait=False, cancel_futures=True)

    # DeepStack

    @_reply_form
    async def detect(self, request: web.Request) -> web.Response:
        """`POST /v1/vision/detection`: the detections of the one camera whose frames come by HTTP."""
        return await self._answer_form(request, None)

    @_reply_form
    async def detect_custom(self, request: web.Request) -> web.Response:
        """`POST /v1/vision/custom/QUERY`."""
        return await self._answer_form(request, request.match_info["id"])

    @_reply_form
    async def list_custom(self, request: web.Request) -> web.Response:
        """`POST /v1/vision/custom/list`: the names for `custom`."""
        if _has_form(request):
            async with self._open_form(request):
                pass
        elif not self._is_proven(request) and not self._access().is_token(await _read_key(request)):
            raise _token_missing()
        return web.json_response({"success": True, "models": list(self._source.push_queries()), "code": 200})

    async def _answer_form(self, request: web.Request, query: str | None) -> web.Response:
        if not _has_form(request):
            raise PushError(415, "send a form (multipart/form-data) with the picture in the field `image`")
        async with self._open_form(request) as form:
            if not form.picture:
                raise PushError(400, "the form has no picture in the field `image`")
            least, pushed = form.min_confidence, self._form_queries(query)
            start = time.monotonic()
            records = await self._push(pushed, partial(decode_picture, form.picture, Path(), formats=PUSHED_FORMATS))
            milliseconds = round(1000 * (time.monotonic() - start))
        predictions = [prediction for record in records.values() for prediction in _predictions(record)]
        predictions = [prediction for prediction in predictions if prediction["confidence"] >= least]
        predictions.sort(key=lambda prediction: -prediction["confidence"])
        return web.json_response(
            {
                "success": True, "predictions": predictions, "count": len(predictions), "code": 200,
                "inferenceMs": milliseconds,
            }
        )  # fmt: skip

    def _form_queries(self, name: str | None) -> list[PushQuery]:
        pushed = self._source.push_queries()
        if name is not None:
            return [self._query(name)]
        found = [one for one in pushed.values() if task_of(one.query).has_boxes]
        if not found:
            raise PushError(404, "no query detects objects in frames that come by HTTP")
        if len({one.camera.id for one in found}) > 1:
            names = ", ".join(one.query.id for one in found)
            raise PushError(400, f"several cameras take frames: use /v1/vision/custom/QUERY with one of {names}")
        return found

    @contextlib.asynccontextmanager
    async def _open_form(self, request: web.Request) -> AsyncIterator[Form]:
        """The form of a sender that has shown the token, in the head or as a field; its room is kept meanwhile."""
        reader = FormReader(request)
        if not self._is_proven(request):
            await self._check_key(request, reader)
        with self._room.take(_announced_bytes(request)) as share:
            reader.raise_bound(MAX_BODY_BYTES)
            form = await _wait_for_body(reader.read_form())
            share.shrink(reader.nbytes)
            yield form

    async def _check_key(self, request: web.Request, reader: FormReader) -> None:
        """Read a form in turn until the token has come; PushError where it does not."""
        access = self._access()
        group = access.group_of(request.headers, request.remote)
        key = await self._turns.read(group, partial(reader.read_until, KEY_FIELD))
        if not access.is_token(key):
            raise _token_missing()

    # KServe v2

    async def server_metadata(self, _: web.Request) -> web.Response:
        """`GET /v2`."""
        return web.json_response({"name": "gemel", "version": "1", "extensions": list(EXTENSIONS)})

    async def live(self, _: web.Request) -> web.Response:
        """`GET /v2/health/live`."""
        return web.Response(status=200 if self._source.is_moving() else 503)

    async def ready(self, _: web.Request) -> web.Response:
        """`GET /v2/health/ready`."""
        return web.Response(status=503 if self._source.missing() else 200)

    @_reply_infer
    async def model_metadata(self, request: web.Request) -> web.Response:
        """`GET /v2/models/QUERY`."""
        found = self._model(request)
        return web.json_response(describe_model(found.query, found.bundle))

    @_reply_infer
    async def model_config(self, request: web.Request) -> web.Response:
        """`GET /v2/models/QUERY/config`."""
        found = self._model(request)
        return web.json_response(describe_config(found.query))

    @_reply_infer
    async def model_statistics(self, request: web.Request) -> web.Response:
        """`GET /v2/models/QUERY/stats`."""
        found = self._model(request)
        return web.json_response({"model_stats": self._statistics([found])})

    async def statistics(self, _: web.Request) -> web.Response:
        """`GET /v2/models/stats`."""
        return web.json_response({"model_stats": self._statistics(list(self._source.push_queries().values()))})

    async def repository_index(self, _: web.Request) -> web.Response:
        """`POST /v2/repository/index`: the queries that take frames by HTTP."""
        rows = [
            {"name": one.query.id, "version": one.bundle, "state": "READY", "reason": ""}
            for one in self._source.push_queries().values()
        ]
        return web.json_response(rows)

    def _statistics(self, pushed: list[PushQuery]) -> list[dict[str, Any]]:
        ledgers = {one.id: one.ledger for one in self._source.status().queries}
        return [describe_statistics(one.query, one.bundle, ledgers[one.query.id]) for one in pushed]

    @_reply_infer
    async def model_ready(self, request: web.Request) -> web.Response:
        """`GET /v2/models/QUERY/ready`."""
        self._model(request)
        return await self.ready(request)

    @_reply_infer
    async def infer(self, request: web.Request) -> web.Response:
        """`POST /v2/models/QUERY/infer`."""
        found = self._model(request)
        with self._room.take(_announced_bytes(request)) as share:
            body = await _wait_for_body(_read_body(request))
            share.shrink(len(body))
            try:
                asked = await self._parse(body, request.headers.get(InferRequest.LENGTH_HEADER))
                records = await self._push([found], asked.decode)
                data, headers = infer_response(asked, found.query, found.bundle, records[found.query.id])
            except ValueError as error:
                raise PushError(400, str(error)) from error
        return web.Response(body=data, headers=headers)

    # Both

    def _query(self, name: str) -> PushQuery:
        found = self._source.push_queries().get(name)
        if found is None:
            raise PushError(404, f"no query '{name[:80]}' takes frames by HTTP")
        return found

    def _model(self, request: web.Request) -> PushQuery:
        """The query of a path, which may name the version too: that of the bundle, the only one."""
        found, version = self._query(request.match_info["id"]), request.match_info.get("version")
        if version not in (None, found.bundle):
            raise PushError(404, f"query '{found.query.id}' has the version {found.bundle} alone")
        return found

    async def _parse(self, body: bytes, header_length: str | None) -> InferRequest:
        """Parse in a thread; where the client leaves before its turn, never."""
        return await asyncio.get_running_loop().run_in_executor(self._parsers, parse_infer, body, header_length)

    async def _push(self, pushed: list[PushQuery], decode: Callable[[], np.ndarray]) -> Records:
        """The records of a frame; PushError where it gets no answer."""
        camera = pushed[0].camera
        future = camera.push([one.query.id for one in pushed], decode)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), camera.timeout_s)
        except asyncio.TimeoutError:
            raise PushError(503, f"there was no answer within {camera.timeout_s:g} s") from None
        except PushDeclined as error:
            status, text = STATUSES.get(error.reason, (503, error.reason))
            raise PushError(status, f"query '{error.query}': {text}") from error
        except InputError as error:
            raise PushError(400, f"the picture {error.problem}") from error
        except UnfitFrame as error:
            raise PushError(400, str(error)) from error


def _has_form(request: web.Request) -> bool:
    return request.content_type == "multipart/form-data"


def _announced_bytes(request: web.Request) -> int | None:
    """The length of a body; None where it is not known before the end."""
    return None if hdrs.CONTENT_ENCODING in request.headers else request.content_length


async def _read_key(request: web.Request) -> str:
    """The token in a form without a file (application/x-www-form-urlencoded); PushError where it is damaged."""
    if request.content_type != "application/x-www-form-urlencoded":
        return ""
    text = await _wait_for_body(request.read())
    try:
        fields = parse_qs(text.decode(), max_num_fields=MAX_FIELDS)
    except ValueError as error:
        raise PushError(400, "the form is damaged, or has too many fields") from error
    return fields.get(KEY_FIELD, [""])[0]


def _token_missing() -> PushError:
    return PushError(401, f"a token is needed: send it as {KEY_FIELD}, or as Authorization: Bearer")


async def _wait_for_body(reading: Awaitable[Value]) -> Value:
    """What is read of a body, within BODY_TIMEOUT_S."""
    try:
        return await asyncio.wait_for(reading, BODY_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise too_slow() from None


async def _read_body(request: web.Request) -> bytes:
    data = bytearray()
    async for chunk in request.content.iter_any():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise too_large(MAX_BODY_BYTES)
    return bytes(data)


def _predictions(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A result in DeepStack's form; PushError for one without labels."""
    if "detections" in record:
        return [_prediction(one["class"], one["score"], one["box"]) for one in record["detections"]]
    if "label" in record:
        return [_prediction(record["label"], record["score"])]
    if "labels" in record:
        return [_prediction(one["class"], one["score"]) for one in record["labels"]]
    query = record["query"]
    raise PushError(400, f"query '{query}' gives neither boxes nor labels: use /v2/models/{query}/infer")


def _prediction(label: str, score: float, box: list[float] | None = None) -> dict[str, Any]:
    places = () if box is None else zip(("x_min", "y_min", "x_max", "y_max"), map(round, box))
    return {"label": label, "confidence": score, **dict(places)}


def refuse_access(path: str, status: int, text: str) -> web.Response | None:
    """A refusal in the form of the path's clients; None for other paths."""
    error = PushError(status, text)
    if path.startswith("/v1/"):
        return _form_error(error)
    return _infer_error(error) if path.startswith("/v2/") else None
