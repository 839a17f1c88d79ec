"""Frigate's detector `zmq`: a ROUTER socket that answers tensors with boxes, in a thread of its own.

The protocol is that of frigate/detectors/plugins/zmq_ipc.py: a JSON header, behind it a tensor or a model.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gemel.edge_runtime.capture.push import PushDeclined, PushQuery, UnfitFrame
from gemel.edge_runtime.life.config import DetectorPortConfig
from gemel.models.bundle import BundleQuery
from gemel.models.errors import InputError, one_line

if TYPE_CHECKING:
    import zmq
    from prometheus_client import Counter

MODEL_TIMEOUT_S = 28.0
"""Frigate waits 30 s for the answer to a model."""
ROWS, COLUMNS = 20, 6
MAX_HEADER_BYTES = 4096
MAX_TENSOR_BYTES, MAX_MODEL_BYTES = 32 << 20, 256 << 20
MAX_CLIENTS = 256
"""Connections whose query is remembered, those used last; a client that was forgotten asks for its model again."""
MAX_WAITING = 8
"""Messages of one connection that wait to be read or sent; the rest stays with the client, or is dropped."""
MAX_ERROR_CHARS = 200
"""An error is shorter than the 480 bytes of an answer, so that no client takes it for one."""
STOP_S = 1.0

log = logging.getLogger("gemel.run")
AddModel = Callable[[str, bytes], "Future[None]"]
"""Prepares a model of this name, and serves it as a query of that name; its error says why not."""


class DetectorOutcome(str, Enum):
    """What became of a tensor."""

    __str__ = str.__str__

    ANSWERED = "answered"
    LATE = "late"
    """Answered after the client's timeout."""
    DECLINED = "declined"
    REFUSED = "refused"
    """It does not fit the protocol."""


class DetectorError(Exception):
    """A request that gets no boxes, in one line."""


class _Header(BaseModel):
    model_config = ConfigDict(extra="ignore")

    model_request: bool = False
    model_data: bool = False
    model_name: Annotated[str, Field(max_length=255)] = ""
    shape: Annotated[list[Annotated[int, Field(ge=1, le=1 << 16)]], Field(max_length=4)] = []
    dtype: Annotated[str, Field(max_length=20)] = ""


def parse_header(data: bytes) -> _Header:
    """The header of a request; DetectorError where it is damaged."""
    if len(data) > MAX_HEADER_BYTES:
        raise DetectorError(f"the header has more than {MAX_HEADER_BYTES} bytes")
    try:
        return _Header.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise DetectorError(f"header: {'.'.join(map(str, first['loc'])) or 'JSON'}: {first['msg']}") from error


def read_pixels(header: _Header, tensor: bytes) -> np.ndarray:
    """The frame of a tensor: RGB uint8 (H, W, 3). DetectorError where header and tensor do not fit each other."""
    shape = tuple(header.shape)
    if header.dtype != "uint8":
        raise DetectorError(f"the dtype is '{header.dtype}', a frame is uint8: set `input_dtype: int`")
    if len(shape) != 4 or shape[0] != 1 or 3 not in (shape[1], shape[3]):
        raise DetectorError(f"the shape {list(shape)} is not [1, H, W, 3] or [1, 3, H, W]")
    if math.prod(shape) != len(tensor):
        raise DetectorError(f"the tensor has {len(tensor)} bytes, its shape {list(shape)} takes {math.prod(shape)}")
    pixels = np.frombuffer(tensor, np.uint8).reshape(shape)[0]
    return pixels if shape[3] == 3 else pixels.transpose(1, 2, 0)


def detection_rows(query: BundleQuery, record: Mapping[str, Any], width: int, height: int) -> np.ndarray:
    """The best boxes of a result, f32 (20, 6): class, score, and y0, x0, y1, x1 in parts of the frame.

    A class is its place in the query's classes; rows without a box are zero.
    """
    numbers = {name: number for number, name in enumerate(query.classes)}
    rows = np.zeros((ROWS, COLUMNS), np.float32)
    detections = sorted(record["detections"], key=lambda detection: -detection["score"])
    for row, detection in zip(rows, detections):
        x0, y0, x1, y1 = detection["box"]
        row[:] = numbers[detection["class"]], detection["score"], y0 / height, x0 / width, y1 / height, x1 / width
    return rows


class DetectorPort:
    """Answers clients at the config's address until it is stopped; `counts` by query and outcome.

    A client names its query by the name of its model's file. `add_model` takes one that no query has; None refuses it.
    """

    def __init__(
        self,
        config: DetectorPortConfig,
        queries: Callable[[], Mapping[str, PushQuery]],
        counts: Counter,
        add_model: AddModel | None = None,
    ) -> None:
        self._config, self._queries, self._counts, self._add_model = config, queries, counts, add_model
        self._clients: OrderedDict[bytes, str] = OrderedDict()
        self._socket: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="zmq", daemon=True)
        self.endpoint = config.bind

    def start(self, where: Any) -> None:
        """Begin to answer; InputError, naming the config `where`, for an address that cannot be used."""
        import zmq

        context = zmq.Context()
        self._socket = socket = context.socket(zmq.ROUTER)
        has_models = self._add_model is not None
        for option, value in {
            zmq.MAXMSGSIZE: MAX_MODEL_BYTES if has_models else MAX_TENSOR_BYTES,
            zmq.RCVHWM: MAX_WAITING, zmq.SNDHWM: MAX_WAITING, zmq.LINGER: 0, zmq.IPV6: int("[" in self._config.bind),
        }.items():  # fmt: skip
            socket.setsockopt(option, value)
        try:
            socket.bind(self._config.bind)
        except zmq.ZMQError as error:
            context.destroy(linger=0)
            problem = f"{self._config.bind} is not available: {one_line(error)}"
            raise InputError(where, problem, "give another address", "zmq.bind") from error
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        log.info("zmq at %s", self.endpoint)
        self._thread.start()

    def stop(self) -> None:
        """End within STOP_S; what is not answered stays so."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # its loop was closed meanwhile
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(STOP_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:
            log.exception("zmq has ended")

    async def _serve(self) -> None:
        import zmq.asyncio

        self._loop = asyncio.get_running_loop()
        assert self._socket is not None
        socket = zmq.asyncio.Socket.shadow(self._socket)
        stopping = asyncio.create_task(self._stopping.wait())
        answers: set[asyncio.Task[None]] = set()
        try:
            while not self._stopping.is_set():
                receiving = asyncio.ensure_future(socket.recv_multipart())
                await asyncio.wait({receiving, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if not receiving.done():
                    receiving.cancel()
                    break
                answer = asyncio.create_task(self._reply(socket, receiving.result()))
                answers.add(answer)
                answer.add_done_callback(answers.discard)
        finally:
            for answer in answers:
                answer.cancel()
            socket.close(linger=0)
            self._socket.context.term()

    async def _reply(self, socket: Any, message: list[bytes]) -> None:
        client, *parts = message
        if len(parts) not in (2, 3) or parts[0]:
            return  # no REQ socket sends this, so no client waits for an answer
        query = self._clients.get(client, "")
        try:
            answer = await self._answer(client, parts[1], parts[2] if len(parts) == 3 else b"")
        except DetectorError as error:
            self._counts.labels(query, DetectorOutcome.REFUSED).inc()
            answer = _error(str(error))
        except (PushDeclined, UnfitFrame, InputError) as error:
            self._counts.labels(query, DetectorOutcome.DECLINED).inc()
            answer = _error(str(error))
        # A client that does not read, or has gone, loses the answer: the socket drops it.
        await socket.send_multipart([client, b"", answer])

    async def _answer(self, client: bytes, head: bytes, data: bytes) -> bytes:
        header = parse_header(head)
        if not header.model_request and not header.model_data:
            return await self._detect(client, read_pixels(header, data))
        query = PurePath(header.model_name).stem
        reply: dict[str, Any] = {"model_available" if header.model_request else "model_saved": self._has(query)}
        is_loaded = self._has(query)
        if header.model_data and not is_loaded:
            reason = await self._take_model(query, data)
            is_loaded = reason is None
            reply = {"model_saved": is_loaded} | ({} if reason is None else {"error": reason[:MAX_ERROR_CHARS]})
        if is_loaded:
            self._clients[client] = query
            self._clients.move_to_end(client)
            if len(self._clients) > MAX_CLIENTS:
                self._clients.popitem(last=False)
        return json.dumps({**reply, "model_loaded": is_loaded}).encode()

    def _has(self, query: str) -> bool:
        pushed = self._queries().get(query)
        return pushed is not None and pushed.query.task == "detection"

    async def _take_model(self, name: str, data: bytes) -> str | None:
        """Serve a model that came; why not, if so.

        Frigate asks once. So one that is still being prepared counts as served, and its tensors get errors until it is.
        """
        if self._add_model is None:
            reason = f"no detection query '{name:.60}' takes frames by HTTP, and `accept_models` is not set"
        else:
            adding = asyncio.wrap_future(self._add_model(name, data))
            try:
                await asyncio.wait_for(asyncio.shield(adding), MODEL_TIMEOUT_S)
                return None
            except asyncio.TimeoutError:
                adding.add_done_callback(_log_failure)
                return None
            except InputError as error:
                reason = str(error)
        log.warning("zmq: a model is refused: %s", reason)
        return reason

    async def _detect(self, client: bytes, pixels: np.ndarray) -> bytes:
        name = self._clients.get(client)
        pushed = None if name is None else self._queries().get(name)
        if name is None:
            raise DetectorError("ask for a model first, named after a query")
        if pushed is None:
            raise PushDeclined(name, "it is not served, or not yet")
        self._clients.move_to_end(client)
        start = asyncio.get_running_loop().time()
        try:
            future = pushed.camera.push([name], lambda: pixels)
            records = await asyncio.wait_for(asyncio.wrap_future(future), pushed.camera.timeout_s)
        except asyncio.TimeoutError:
            raise PushDeclined(name, f"there was no answer within {pushed.camera.timeout_s:g} s") from None
        is_late = asyncio.get_running_loop().time() - start > self._config.timeout_ms / 1000
        self._counts.labels(name, DetectorOutcome.LATE if is_late else DetectorOutcome.ANSWERED).inc()
        height, width = pixels.shape[:2]
        return detection_rows(pushed.query, records[name], width, height).tobytes()


def _log_failure(adding: asyncio.Future[None]) -> None:
    if not adding.cancelled() and (error := adding.exception()) is not None:
        log.warning("zmq: a model is refused: %s", error)


def _error(text: str) -> bytes:
    return json.dumps({"error": one_line(text)[:MAX_ERROR_CHARS]}).encode()
