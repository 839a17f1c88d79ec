"""The last hour of a box, a sample every few seconds, for the dashboard's curves.

The schema of what a box answers over HTTP (OpenAPI 3.1).

HTTP of a box: aiohttp in a thread of its own, which asks the box and never makes it wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import socket
import threading
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from importlib import resources
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

import edge_runtime.http
from edge_runtime.http.auth import COOKIE, Access
from edge_runtime.http.metrics import CONTENT_TYPE, Metrics
from edge_runtime.http.snapshots import Snapshot
from edge_runtime.http.status import Status, StatusSource
from models.errors import InputError

HISTORY_INTERVAL_S = 5.0
HISTORY_S = 3600.0


COLUMNS = ("at", "resident_bytes", "workspace_bytes", "age_p95_ms", "dropped")
"""`at` in Unix seconds; `age_p95_ms` is the worst query's; `dropped` are frames since the start."""
ROWS = round(HISTORY_S / HISTORY_INTERVAL_S)


class History:
    """Samples of what a status says, the newest hour of them, in memory that is taken once."""

    def __init__(self) -> None:
        self._columns = {name: array("d", bytes(8 * ROWS)) for name in COLUMNS}
        self._noted = 0

    def note(self, unix_s: float, status: Status) -> None:
        """Take a sample at this time."""
        ages = [query.age_p95_ms for query in status.queries if query.age_p95_ms is not None]
        dropped = sum(sum(query.ledger.dropped.values()) for query in status.queries)
        row = (
            round(unix_s, 1), status.resident_bytes, status.workspace_bytes, max(ages, default=math.nan), dropped,
        )  # fmt: skip
        for name, value in zip(COLUMNS, row, strict=True):
            self._columns[name][self._noted % ROWS] = value
        self._noted += 1

    def to_json(self) -> dict[str, list[Any]]:
        """The columns, oldest sample first; null where a sample has no age, whole numbers but for `at` and the ages."""
        first = max(0, self._noted - ROWS)
        places = [index % ROWS for index in range(first, self._noted)]
        told = {name: [column[place] for place in places] for name, column in self._columns.items()}
        ages = [None if math.isnan(age) else age for age in told["age_p95_ms"]]
        whole = {name: [int(value) for value in told[name]] for name in COLUMNS if name not in ("at", "age_p95_ms")}
        return {**told, **whole, "age_p95_ms": ages}


TEXT, JSON = "text/plain", "application/json"


def openapi_document() -> dict[str, Any]:
    """The document of `/openapi.json`."""
    schema = Status.model_json_schema(ref_template="#/components/schemas/{model}")
    parts = schema.pop("$defs", {})
    return {
        "openapi": "3.1.0",
        "info": {"title": "A Gemel box", "version": "1"},
        "paths": {
            "/": {"get": _get("The dashboard.",
                              {200: ("the page", "text/html"), 401: ("asks for the token", "text/html")})},
            "/healthz": {"get": _get("Whether the thread that runs queries goes on.",
                                     {200: ("it does", TEXT), 503: ("it does not", TEXT)})},
            "/readyz": {"get": _get("Whether the box has all that it needs.",
                                    {200: ("it has", JSON, _missing()), 503: ("what is missing", JSON, _missing())})},
            "/metrics": {"get": _get("Metrics for Prometheus.", {200: ("text format 0.0.4", TEXT)})},
            "/api/status": {"get": _get("The box at this moment.",
                                        {200: ("the box", JSON, {"$ref": "#/components/schemas/Status"})})},
            "/api/history": {"get": _get("The last hour, in columns.",
                                         {200: ("the columns", JSON, {"type": "object"})})},
            "/api/cameras/{id}/frame.jpg": {"get": {
                **_get("A camera's newest frame with its results.",
                       {200: ("the frame", "image/jpeg"), 404: ("no such camera, or no frame yet", TEXT)}),
                "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}],
            }},
            "/api/session": {"post": _post("The token of the request becomes a cookie.", {204: ("it did", None)})},
            "/api/reload": {"post": _post("Config and bundle are taken up as they are now.",
                                          {200: ("they are applied", JSON, _applied()),
                                           409: ("they are not, and why", JSON, _applied("reason"))})},
            "/openapi.json": {"get": _get("This document.", {200: ("the document", JSON, {"type": "object"})})},
        },
        "components": {
            "schemas": {"Status": schema, **parts},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }  # fmt: skip


def _get(told: str, answers: dict[int, tuple[Any, ...]]) -> dict[str, Any]:
    refused = {401: ("a token is needed", TEXT), 403: ("refused", TEXT)}
    return {"summary": told, "security": [{}, {"token": []}], "responses": _answers({**refused, **answers})}


def _post(told: str, answers: dict[int, tuple[Any, ...]]) -> dict[str, Any]:
    return {**_get(told, answers), "security": [{"token": []}]}


def _answers(answers: dict[int, tuple[Any, ...]]) -> dict[str, Any]:
    return {
        str(code): {"description": told, **({"content": {kind: {"schema": _schema(more)}}} if kind else {})}
        for code, (told, kind, *more) in sorted(answers.items())
    }


def _schema(more: list[Any]) -> dict[str, Any]:
    return more[0] if more else {"type": "string"}


def _applied(*more: str) -> dict[str, Any]:
    return {
        "type": "object", "required": ["applied", *more], "additionalProperties": False,
        "properties": {"applied": {"type": "boolean"}, **{name: {"type": "string"} for name in more}},
    }  # fmt: skip


def _missing() -> dict[str, Any]:
    return {
        "type": "object", "required": ["missing"],
        "properties": {"missing": {"type": "array", "items": {"type": "string"}}},
    }  # fmt: skip


PICTURES_PER_S = 5.0
MAX_CLIENTS = 16
"""Dashboards open at once."""
MAX_CONNECTIONS = 128
"""Open at once, dashboards included, and a hundred more where they come in a burst: whoever asks must leave the box
descriptors for its cameras and files.
"""
MAX_BODY_BYTES = 4096
STATUS_EVERY_S = 1.0
TIMEOUT_S = 2.0
PAGE = {
    "index.html": "text/html", "login.html": "text/html", "dashboard.js": "text/javascript",
    "login.js": "text/javascript", "dashboard.css": "text/css", "uplot.js": "text/javascript", "uplot.css": "text/css",
}  # fmt: skip
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

log = logging.getLogger("gemel.run")
unheard = logging.getLogger("gemel.run.http")
"""Of what is no HTTP aiohttp would tell a traceback, and anybody can send that."""
unheard.setLevel(logging.CRITICAL)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def check_address(access: Access, where: str | Path) -> None:
    """Raise InputError, naming the config, where the address cannot be had at present."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(access.host, access.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
            tried.listen(1)
    except OSError as error:
        raise _taken(access, where, error) from error


def _taken(access: Access, where: str | Path, error: OSError) -> InputError:
    fault = f"{access.host}:{access.port} cannot be had: {error.strerror or error}"
    return InputError(where, fault, "give another address, or end what has it", "http.bind")


class HttpService:
    """Serves a box's status, metrics, pictures and dashboard until it is stopped."""

    def __init__(self, box: StatusSource, measures: Metrics, access: Access, where: str | Path) -> None:
        """`where` names the config in what is said when the address cannot be had."""
        self._pages = Pages(box, measures, access)
        self._access, self._where = access, where
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self.port = access.port

    def start(self) -> None:
        """Begin to serve; InputError where the address cannot be had. Port 0 takes a free one, told in `port`."""
        self._thread.start()
        try:
            self._opened.result()
        except OSError as error:
            raise _taken(self._access, self._where, error) from error
        log.info("watch it at http://%s:%d/", self._access.host, self.port)

    def admit(self, access: Access) -> None:
        """Go on with another token."""
        self._pages.access = access

    def stop(self) -> None:
        """End; what hangs is left."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # its loop was closed meanwhile
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(TIMEOUT_S)

    async def _open(self) -> None:
        self._runner = runner = web.AppRunner(
            self._pages.application(), access_log=None, shutdown_timeout=0.5, logger=unheard
        )
        await runner.setup()
        self._server = await self._loop.create_server(lambda: _accepted(runner), self._access.host, self._access.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        fault: BaseException | None = None
        try:
            self._loop.run_until_complete(self._open())
        except BaseException as error:
            fault = error
        else:
            self._opened.set_result(None)
            self._loop.run_forever()
        with contextlib.suppress(Exception):
            if self._server is not None:
                self._server.close()
            if self._runner is not None:
                self._loop.run_until_complete(asyncio.wait_for(self._runner.cleanup(), TIMEOUT_S / 2))
        self._loop.close()
        if fault is not None:  # whoever waits for it may end the process at that
            self._opened.set_exception(fault)


class _TurnedAway(asyncio.Protocol):
    """A connection that is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def _accepted(runner: web.AppRunner) -> asyncio.BaseProtocol:
    """What deals with a connection that comes."""
    server = runner.server
    assert server is not None
    return _TurnedAway() if len(server.connections) >= MAX_CONNECTIONS else server()


class Pages:
    """What is answered at which path."""

    def __init__(self, box: StatusSource, measures: Metrics, access: Access) -> None:
        self._box, self._measures, self.access = box, measures, access
        self._history = History()
        self._watching: set[web.WebSocketResponse] = set()
        self._schema = json.dumps(openapi_document()).encode()

    def application(self) -> web.Application:
        """The aiohttp application."""
        made = web.Application(middlewares=[self._guarded], client_max_size=MAX_BODY_BYTES)
        made.cleanup_ctx.append(self._remembering)
        made.on_shutdown.append(self._close_all)
        made.router.add_get("/", self._index)
        made.router.add_get("/page/{name}", self._file)
        made.router.add_get("/healthz", self._health)
        made.router.add_get("/readyz", self._ready)
        made.router.add_get("/metrics", self._metrics)
        made.router.add_get("/openapi.json", self._openapi)
        made.router.add_get("/api/status", self._status)
        made.router.add_get("/api/history", self._hour)
        made.router.add_get("/api/cameras/{id}/frame.jpg", self._frame)
        made.router.add_get("/api/watch", self._watch)
        made.router.add_post("/api/session", self._session)
        made.router.add_post("/api/reload", self._reload)
        return made

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The rules of access, the same headers for every answer, and no traceback to anybody."""
        answer = self._refused(request)
        if answer is None:
            try:
                answer = await handler(request)
            except web.HTTPException as error:
                answer = web.Response(status=error.status, text=error.reason, headers=_allowed(error))
            except asyncio.CancelledError:
                raise
            except Exception:
                log.exception("HTTP %s %s failed", request.method, request.path[:200])
                answer = web.Response(status=500, text="this box has a fault: see its log")
        if not answer.prepared:
            answer.headers.update({key: text for key, text in HEADERS.items() if key not in answer.headers})
        return answer

    def _refused(self, request: web.Request) -> web.Response | None:
        open_to_all = request.method in ("GET", "HEAD") and request.path.startswith("/page/")
        refusal = self.access.refusal(request.method, request.headers, open_to_all)
        if refusal is None:
            return None
        status, reason = refusal
        if request.path == "/" and status == 401 and request.method == "GET":
            return web.Response(status=status, body=_page("login.html"), content_type="text/html", charset="utf-8")
        challenge = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        return web.Response(status=status, text=reason, headers=challenge)

    async def _index(self, _: web.Request) -> web.Response:
        return web.Response(body=_page("index.html"), content_type="text/html", charset="utf-8")

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in PAGE:
            raise web.HTTPNotFound
        return web.Response(body=_page(name), content_type=PAGE[name], charset="utf-8")

    async def _health(self, _: web.Request) -> web.Response:
        moving, fault = self._box.moving(), self._box.bundle_fault()
        said = [] if fault is None else [f"bundle: {fault}"]
        text = "\n".join(["moving" if moving else "stuck", *said, ""])
        return web.Response(status=200 if moving else 503, text=text)

    async def _ready(self, _: web.Request) -> web.Response:
        missing = self._box.missing()
        return web.json_response({"missing": missing}, status=503 if missing else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._measures.text(self._box.status), headers={"Content-Type": CONTENT_TYPE})

    async def _openapi(self, _: web.Request) -> web.Response:
        return web.Response(body=self._schema, content_type="application/json")

    async def _status(self, _: web.Request) -> web.Response:
        return web.Response(text=self._box.status().model_dump_json(), content_type="application/json")

    async def _hour(self, _: web.Request) -> web.Response:
        return web.json_response(self._history.to_json())

    async def _frame(self, request: web.Request) -> web.Response:
        try:
            picture = self._box.picture(request.match_info["id"])
        except KeyError:
            raise web.HTTPNotFound(reason="no such camera") from None
        if picture is None:
            raise web.HTTPNotFound(reason="no frame of this camera yet")
        return web.Response(body=await asyncio.to_thread(picture.jpeg), content_type="image/jpeg")

    async def _session(self, _: web.Request) -> web.Response:
        """Whoever came so far has the token: the dashboard keeps it in a cookie that scripts cannot read."""
        answer = web.Response(status=204)
        answer.set_cookie(COOKIE, self.access.token or "", httponly=True, samesite="Strict", path="/")
        return answer

    async def _reload(self, _: web.Request) -> web.Response:
        """The answer comes when it is over: the checks take seconds."""
        reason = await asyncio.wrap_future(self._box.reload())
        if reason is None:
            return web.json_response({"applied": True})
        return web.json_response({"applied": False, "reason": reason}, status=409)

    async def _watch(self, request: web.Request) -> web.WebSocketResponse:
        """A dashboard: the status every second as text, pictures as they come as bytes.

        A picture is the length of a JSON head (four bytes, big-endian), the head and a JPEG. Who reads slowly gets
        fewer.
        """
        if len(self._watching) >= MAX_CLIENTS:
            raise web.HTTPServiceUnavailable(reason=f"{MAX_CLIENTS} dashboards are open already")
        dashboard = web.WebSocketResponse(heartbeat=20, max_msg_size=MAX_BODY_BYTES, compress=False)
        dashboard.headers.update(HEADERS)
        await dashboard.prepare(request)
        self._watching.add(dashboard)
        telling = asyncio.create_task(self._tell(dashboard))
        try:
            async for message in dashboard:  # nothing is said to the box this way
                if message.type is WSMsgType.ERROR:
                    break
        finally:
            telling.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await telling
            self._watching.discard(dashboard)
        return dashboard

    async def _tell(self, dashboard: web.WebSocketResponse) -> None:
        shown: dict[str, tuple[object, ...]] = {}
        cameras: list[str] = []
        told_at = -STATUS_EVERY_S
        while not dashboard.closed:
            now = time.monotonic()
            if now - told_at >= STATUS_EVERY_S:
                told_at, status = now, self._box.status()
                cameras = [camera.id for camera in status.cameras]
                await dashboard.send_str(status.model_dump_json())
            due = {}
            for camera in cameras:
                picture = self._picture(camera)
                if picture is None:
                    continue
                seen = (picture.frame, picture.answered_at)
                if shown.get(camera) != seen:
                    shown[camera], due[camera] = seen, picture
            jpegs = await asyncio.to_thread(_jpegs, list(due.values()))
            for (camera, picture), jpeg in zip(due.items(), jpegs, strict=True):
                text = json.dumps({"camera": camera, "told_at": time.time(), **picture.to_json()}).encode()
                await dashboard.send_bytes(len(text).to_bytes(4, "big") + text + jpeg)
            await asyncio.sleep(max(0.0, 1 / PICTURES_PER_S - (time.monotonic() - now)))

    def _picture(self, camera: str) -> Snapshot | None:
        """The newest of a camera, which may have gone with a reload."""
        try:
            return self._box.picture(camera)
        except KeyError:
            return None

    async def _remembering(self, _: web.Application) -> AsyncIterator[None]:
        """Samples for the curves, as long as the application lives."""

        async def note() -> None:
            while True:
                self._history.note(time.time(), self._box.status())
                await asyncio.sleep(HISTORY_INTERVAL_S)

        noting = asyncio.create_task(note())
        yield
        noting.cancel()

    async def _close_all(self, _: web.Application) -> None:
        for dashboard in list(self._watching):
            await dashboard.close(code=1001, message=b"the box stops")


def _jpegs(pictures: Sequence[Snapshot]) -> list[bytes]:
    return [one.jpeg() for one in pictures]


def _page(name: str) -> bytes:
    return resources.files(edge_runtime.http).joinpath("page").joinpath(name).read_bytes()


def _allowed(error: web.HTTPException) -> dict[str, str]:
    return {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
