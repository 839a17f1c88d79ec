"""Frames by HTTP in the two forms that clients speak: DeepStack's (also CodeProject.AI's), and KServe's v2 (Triton)."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import BodyPartReader, hdrs, web

from edge_runtime.capture.push import STOPPED, PushDeclined, PushQuery, Records, UnfitFrame
from edge_runtime.events.stage import OFF
from edge_runtime.http.auth import Access
from edge_runtime.http.kserve import InferRequest, describe_model, infer_response, parse_infer
from edge_runtime.queues import DEADLINE, FAILED, MEMORY, OVERLOAD, PAUSED, RELOADED, REPLACED
from models.errors import InputError
from models.pictures import decode_picture

if TYPE_CHECKING:
    import numpy as np

    from edge_runtime.live_status import RuntimeStatus

MAX_BODY_BYTES = 32 * 2**20
"""Of one frame: a picture, or the pixels of 3840 x 2160."""
MAX_OPEN_BYTES = 128 * 2**20
"""Of all bodies that are received or wait to be decoded."""
MAX_FIELDS, MAX_FIELD_BYTES = 16, 4096
CHUNK_BYTES = 2**16
BODY_TIMEOUT_S = 8.0
"""Before the connection is closed (`edge_runtime.http.connections`)."""
RETRY_AFTER_S = "1"
STATUSES = {
    OVERLOAD: (429, "too many of its frames wait"), REPLACED: (429, "newer frames came while it waited"),
    DEADLINE: (429, "it could not be answered in time"), MEMORY: (429, "there is no memory for its frames"),
    PAUSED: (503, "it fails at present"), RELOADED: (503, "the box has reloaded its config"),
    STOPPED: (503, "the box stops"), OFF: (503, "it is off by its schedule"), FAILED: (500, "it failed on the frame"),
}  # fmt: skip
"""Status and text for the reason of a frame without an answer."""
DETECTIONS = ("detection", "keypoints")
KEY_FIELD = "api_key"

log = logging.getLogger("gemel.run")
Value = TypeVar("Value")
Handler = Callable[["PushApi", web.Request], Awaitable[web.Response]]


class PushError(Exception):
    """A request that gets no answer: a status and one line."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


@dataclass(frozen=True)
class Form:
    """A multipart form: the picture and the other fields."""

    picture: bytes
    fields: Mapping[str, str]

    @property
    def min_confidence(self) -> float:
        """The lowest confidence of a prediction; PushError where it is no number from 0 to 1."""
        text = self.fields.get("min_confidence", "0")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= 1:
            raise PushError(400, f"min_confidence '{text[:40]}' is no number from 0 to 1")
        return value


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
    """The handlers of both forms; `access` gives the present token."""

    def __init__(self, source: RuntimeStatus, access: Callable[[], Access]) -> None:
        self._source, self._access = source, access
        self._open_bytes = 0

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
        await self._read(request, partial(self._read_form, request, False))
        return web.json_response({"success": True, "models": list(self._source.push_queries()), "code": 200})

    async def _answer_form(self, request: web.Request, query: str | None) -> web.Response:
        form = await self._read(request, partial(self._read_form, request))
        least, pushed = form.min_confidence, self._form_queries(query)
        start = time.monotonic()
        records = await self._push(pushed, partial(decode_picture, form.picture, Path()))
        milliseconds = round(1000 * (time.monotonic() - start))
        predictions = [one for record in records.values() for one in _predictions(record)]
        predictions = [one for one in predictions if one["confidence"] >= least]
        predictions.sort(key=lambda one: -one["confidence"])
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
        found = [one for one in pushed.values() if one.query.task in DETECTIONS]
        if not found:
            raise PushError(404, "no query detects objects in frames that come by HTTP")
        if len({one.camera.id for one in found}) > 1:
            names = ", ".join(one.query.id for one in found)
            raise PushError(400, f"several cameras take frames: use /v1/vision/custom/QUERY with one of {names}")
        return found

    async def _read_form(self, request: web.Request, has_picture: bool = True) -> Form:
        if request.content_type == "multipart/form-data":
            try:
                form = await _parse_form(request)
            except (ValueError, AssertionError, LookupError) as error:
                raise PushError(400, f"the form is damaged: {error}") from error
        elif has_picture:
            raise PushError(415, "send a form (multipart/form-data) with the picture in the field `image`")
        else:
            form = Form(b"", {})
        access = self._access()
        if not access.has_token(request.headers) and not access.is_token(form.fields.get(KEY_FIELD, "")):
            raise PushError(401, f"a token is needed: send it as {KEY_FIELD}, or as Authorization: Bearer")
        if has_picture and not form.picture:
            raise PushError(400, "the form has no picture in the field `image`")
        return form

    # KServe v2

    async def server_metadata(self, _: web.Request) -> web.Response:
        """`GET /v2`."""
        return web.json_response({"name": "gemel", "version": "1", "extensions": ["binary_tensor_data"]})

    async def live(self, _: web.Request) -> web.Response:
        """`GET /v2/health/live`."""
        return web.Response(status=200 if self._source.is_moving() else 503)

    async def ready(self, _: web.Request) -> web.Response:
        """`GET /v2/health/ready`."""
        return web.Response(status=503 if self._source.missing() else 200)

    @_reply_infer
    async def model_metadata(self, request: web.Request) -> web.Response:
        """`GET /v2/models/QUERY`."""
        found = self._query(request.match_info["id"])
        return web.json_response(describe_model(found.query, found.bundle))

    @_reply_infer
    async def model_ready(self, request: web.Request) -> web.Response:
        """`GET /v2/models/QUERY/ready`."""
        self._query(request.match_info["id"])
        return await self.ready(request)

    @_reply_infer
    async def infer(self, request: web.Request) -> web.Response:
        """`POST /v2/models/QUERY/infer`."""
        found = self._query(request.match_info["id"])
        body = await self._read(request, partial(_read_body, request))
        try:
            asked = await asyncio.to_thread(parse_infer, body, request.headers.get(InferRequest.LENGTH_HEADER))
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

    async def _read(self, request: web.Request, read: Callable[[], Awaitable[Value]]) -> Value:
        """What `read` makes of the body, within the bounds of bytes and time."""
        nbytes = MAX_BODY_BYTES if request.content_length is None else request.content_length
        if nbytes > MAX_BODY_BYTES:
            raise _too_large()
        if self._open_bytes + nbytes > MAX_OPEN_BYTES:
            raise PushError(429, "too many frames come at once")
        self._open_bytes += nbytes
        try:
            return await asyncio.wait_for(read(), BODY_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise PushError(408, f"the frame took longer than {BODY_TIMEOUT_S:g} s to arrive") from None
        finally:
            self._open_bytes -= nbytes

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


async def _parse_form(request: web.Request) -> Form:
    """The fields of a multipart body; PushError where they are too many or too large."""
    picture, fields, nbytes = b"", dict[str, str](), 0
    reader = await request.multipart()
    while (part := await reader.next()) is not None:
        if not isinstance(part, BodyPartReader) or len(fields) >= MAX_FIELDS:
            raise PushError(400, "the form has nested or too many fields")
        data = bytearray()
        while chunk := await part.read_chunk(CHUNK_BYTES):
            data += chunk
            if nbytes + len(data) > MAX_BODY_BYTES:
                raise _too_large()
        nbytes += len(data)
        if part.name in ("image", "image1"):
            picture = bytes(data)
        elif len(data) > MAX_FIELD_BYTES:
            raise PushError(400, f"the field {str(part.name)[:40]} is too long")
        else:
            fields[str(part.name)] = data.decode(errors="replace").strip()
    return Form(picture, fields)


async def _read_body(request: web.Request) -> bytes:
    data = bytearray()
    async for chunk in request.content.iter_any():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise _too_large()
    return bytes(data)


def _too_large() -> PushError:
    return PushError(413, f"the body has more than {MAX_BODY_BYTES // 2**20} MiB")


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
