"""The HTTP service of a box: aiohttp in a thread of its own, which never makes the inference wait."""

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
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
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

SNAPSHOT_INTERVAL_S, STATUS_INTERVAL_S = 0.2, 1.0
MAX_CLIENTS = 16
"""Dashboards open at once."""
MAX_CONNECTIONS = 128
"""Open at once, dashboards included; the box needs file descriptors for its cameras and files."""
MAX_BODY_BYTES = 4096
TIMEOUT_S = 2.0
HISTORY_INTERVAL_S, HISTORY_S = 5.0, 3600.0
HISTORY_ROWS = round(HISTORY_S / HISTORY_INTERVAL_S)
HISTORY_COLUMNS = ("at", "resident_bytes", "workspace_bytes", "age_p95_ms", "dropped")
"""`at` in Unix seconds; `age_p95_ms` is the worst query's; `dropped` are frames since the start."""
PAGE_FILES = {
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
TEXT, JSON, HTML = "text/plain", "application/json", "text/html"

log = logging.getLogger("gemel.run")
silent = logging.getLogger("gemel.run.http")
"""aiohttp would log a traceback for malformed requests, which anybody can send."""
silent.setLevel(logging.CRITICAL)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Route:
    """One path of the service, and its documentation: by status a description, a media type and its JSON schema."""

    method: str
    path: str
    handler: Handler
    summary: str = ""
    responses: Mapping[int, tuple[str, str | None, dict[str, Any]]] | None = None
    """None for a path that the OpenAPI document leaves out."""


def openapi_document(routes: list[Route]) -> dict[str, Any]:
    """The document of `/openapi.json` (OpenAPI 3.1)."""
    status = Status.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas = status.pop("$defs", {})
    paths: dict[str, Any] = {}
    for route in routes:
        if route.responses is None:
            continue
        refusals = {401: ("a token is needed", TEXT, {}), 403: ("refused", TEXT, {})}
        operation = {
            "summary": route.summary,
            "security": [{"token": []}] if route.method == "POST" else [{}, {"token": []}],
            "responses": {
                str(code): {
                    "description": text,
                    **({"content": {media: {"schema": schema or {"type": "string"}}}} if media else {}),
                }
                for code, (text, media, schema) in sorted({**refusals, **route.responses}.items())
            },
        }
        if "{id}" in route.path:
            operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths[route.path] = {route.method.lower(): operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "A Gemel box", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": {"Status": status, **schemas},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


class History:
    """The status of the last hour, one sample every few seconds, in preallocated memory."""

    def __init__(self) -> None:
        self._columns = {name: array("d", bytes(8 * HISTORY_ROWS)) for name in HISTORY_COLUMNS}
        self._count = 0

    def add(self, unix_s: float, status: Status) -> None:
        """Add a sample."""
        ages = [query.age_p95_ms for query in status.queries if query.age_p95_ms is not None]
        dropped = sum(sum(query.ledger.dropped.values()) for query in status.queries)
        row = round(unix_s, 1), status.resident_bytes, status.workspace_bytes, max(ages, default=math.nan), dropped
        for name, value in zip(HISTORY_COLUMNS, row, strict=True):
            self._columns[name][self._count % HISTORY_ROWS] = value
        self._count += 1

    def to_json(self) -> dict[str, list[Any]]:
        """The columns, oldest sample first; null where a sample has no age, counts and bytes as integers."""
        rows = [index % HISTORY_ROWS for index in range(max(0, self._count - HISTORY_ROWS), self._count)]
        columns: dict[str, list[Any]] = {name: [column[row] for row in rows] for name, column in self._columns.items()}
        for name in ("resident_bytes", "workspace_bytes", "dropped"):
            columns[name] = [int(value) for value in columns[name]]
        columns["age_p95_ms"] = [None if math.isnan(age) else age for age in columns["age_p95_ms"]]
        return columns


def check_address(access: Access, where: str | Path) -> None:
    """Raise InputError, naming the config, where the address is not available at present."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(access.host, access.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise _address_error(access, where, error) from error


def _address_error(access: Access, where: str | Path, error: OSError) -> InputError:
    problem = f"{access.host}:{access.port} is not available: {error.strerror or error}"
    return InputError(where, problem, "give another address, or end the program that uses it", "http.bind")


class HttpService:
    """Serves a box's status, metrics, snapshots and dashboard until it is stopped; `where` names the config."""

    def __init__(self, source: StatusSource, metrics: Metrics, access: Access, where: str | Path) -> None:
        self._app = BoxApp(source, metrics, access)
        self._access, self._where = access, where
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self.port = access.port

    def start(self) -> None:
        """Begin to serve; InputError where the address is not available. Port 0 takes a free one (`port`)."""
        self._thread.start()
        try:
            self._opened.result()
        except OSError as error:
            raise _address_error(self._access, self._where, error) from error
        log.info("dashboard at http://%s:%d/", self._access.host, self.port)

    def set_access(self, access: Access) -> None:
        """Use another token."""
        self._app.access = access

    def stop(self) -> None:
        """End within TIMEOUT_S."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # its loop was closed meanwhile
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(TIMEOUT_S)

    async def _open(self) -> None:
        self._runner = runner = web.AppRunner(
            self._app.application(), access_log=None, shutdown_timeout=0.5, logger=silent
        )
        await runner.setup()
        self._server = await self._loop.create_server(lambda: _protocol(runner), self._access.host, self._access.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        failure: BaseException | None = None
        try:
            self._loop.run_until_complete(self._open())
        except BaseException as error:
            failure = error
        else:
            self._opened.set_result(None)
            self._loop.run_forever()
        with contextlib.suppress(Exception):
            if self._server is not None:
                self._server.close()
            if self._runner is not None:
                self._loop.run_until_complete(asyncio.wait_for(self._runner.cleanup(), TIMEOUT_S / 2))
        self._loop.close()
        if failure is not None:  # last, since `start` may end the process then
            self._opened.set_exception(failure)


class _Rejected(asyncio.Protocol):
    """A connection beyond the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def _protocol(runner: web.AppRunner) -> asyncio.BaseProtocol:
    server = runner.server
    assert server is not None
    return _Rejected() if len(server.connections) >= MAX_CONNECTIONS else server()


class BoxApp:
    """The routes and their handlers."""

    def __init__(self, source: StatusSource, metrics: Metrics, access: Access) -> None:
        self._source, self._metrics, self.access = source, metrics, access
        self._history = History()
        self._dashboards: set[web.WebSocketResponse] = set()
        self._routes = self._define_routes()
        self._schema = json.dumps(openapi_document(self._routes)).encode()

    def _define_routes(self) -> list[Route]:
        missing = _object({"missing": {"type": "array", "items": {"type": "string"}}})
        applied, reason = {"applied": {"type": "boolean"}}, {"reason": {"type": "string"}}
        status = {"$ref": "#/components/schemas/Status"}
        return [
            Route("GET", "/", self._index, "The dashboard.",
                  {200: ("the page", HTML, {}), 401: ("asks for the token", HTML, {})}),
            Route("GET", "/healthz", self._health, "Whether the thread that runs queries goes on.",
                  {200: ("it does", TEXT, {}), 503: ("it does not", TEXT, {})}),
            Route("GET", "/readyz", self._ready, "Whether the box is ready.",
                  {200: ("it is", JSON, missing), 503: ("what is missing", JSON, missing)}),
            Route("GET", "/metrics", self._metrics_text, "Metrics for Prometheus.",
                  {200: ("text format 0.0.4", TEXT, {})}),
            Route("GET", "/api/status", self._status, "The box at this moment.", {200: ("the box", JSON, status)}),
            Route("GET", "/api/history", self._last_hour, "The last hour, in columns.",
                  {200: ("the columns", JSON, {"type": "object"})}),
            Route("GET", "/api/cameras/{id}/frame.jpg", self._frame, "A camera's newest frame with its results.",
                  {200: ("the frame", "image/jpeg", {}), 404: ("no such camera, or no frame yet", TEXT, {})}),
            Route("POST", "/api/session", self._session, "Store the token of the request in a cookie.",
                  {204: ("done", None, {})}),
            Route("POST", "/api/reload", self._reload, "Reload config and bundle.",
                  {200: ("applied", JSON, _object(applied)),
                   409: ("not applied, and why", JSON, _object({**applied, **reason}))}),
            Route("GET", "/openapi.json", self._openapi, "This document.",
                  {200: ("the document", JSON, {"type": "object"})}),
            Route("GET", "/page/{name}", self._page_file),
            Route("GET", "/api/watch", self._watch),
        ]  # fmt: skip

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._record_history)
        app.on_shutdown.append(self._close_dashboards)
        for route in self._routes:
            app.router.add_route(route.method, route.path, route.handler)
            if route.method == "GET":
                app.router.add_head(route.path, route.handler)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check access, add the headers of every response, and hide tracebacks."""
        response = self._refuse(request)
        if response is None:
            try:
                response = await handler(request)
            except web.HTTPException as error:
                allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
                response = web.Response(status=error.status, text=error.reason, headers=allow)
            except asyncio.CancelledError:
                raise
            except Exception:
                log.exception("HTTP %s %s failed", request.method, request.path[:200])
                response = web.Response(status=500, text="internal error: see the log of the box")
        if not response.prepared:
            response.headers.update({key: text for key, text in HEADERS.items() if key not in response.headers})
        return response

    def _refuse(self, request: web.Request) -> web.Response | None:
        is_public = request.method in ("GET", "HEAD") and request.path.startswith("/page/")
        refusal = self.access.check(request.method, request.headers, is_public)
        if refusal is None:
            return None
        status, reason = refusal
        if request.path == "/" and status == 401 and request.method == "GET":
            return web.Response(status=status, body=_read_page("login.html"), content_type=HTML, charset="utf-8")
        challenge = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        return web.Response(status=status, text=reason, headers=challenge)

    async def _index(self, _: web.Request) -> web.Response:
        return web.Response(body=_read_page("index.html"), content_type=HTML, charset="utf-8")

    async def _page_file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in PAGE_FILES:
            raise web.HTTPNotFound
        return web.Response(body=_read_page(name), content_type=PAGE_FILES[name], charset="utf-8")

    async def _health(self, _: web.Request) -> web.Response:
        is_moving, problem = self._source.is_moving(), self._source.bundle_problem()
        lines = ["moving" if is_moving else "stuck", *([] if problem is None else [f"bundle: {problem}"]), ""]
        return web.Response(status=200 if is_moving else 503, text="\n".join(lines))

    async def _ready(self, _: web.Request) -> web.Response:
        missing = self._source.missing()
        return web.json_response({"missing": missing}, status=503 if missing else 200)

    async def _metrics_text(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.to_text(self._source.status), headers={"Content-Type": CONTENT_TYPE})

    async def _openapi(self, _: web.Request) -> web.Response:
        return web.Response(body=self._schema, content_type=JSON)

    async def _status(self, _: web.Request) -> web.Response:
        return web.Response(text=self._source.status().model_dump_json(), content_type=JSON)

    async def _last_hour(self, _: web.Request) -> web.Response:
        return web.json_response(self._history.to_json())

    async def _frame(self, request: web.Request) -> web.Response:
        try:
            snapshot = self._source.snapshot(request.match_info["id"])
        except KeyError:
            raise web.HTTPNotFound(reason="no such camera") from None
        if snapshot is None:
            raise web.HTTPNotFound(reason="no frame of this camera yet")
        return web.Response(body=await asyncio.to_thread(snapshot.jpeg), content_type="image/jpeg")

    async def _session(self, _: web.Request) -> web.Response:
        """The request had the token: the dashboard keeps it in a cookie that scripts cannot read."""
        response = web.Response(status=204)
        response.set_cookie(COOKIE, self.access.token or "", httponly=True, samesite="Strict", path="/")
        return response

    async def _reload(self, _: web.Request) -> web.Response:
        """Responds when the reload is over, which takes seconds."""
        reason = await asyncio.wrap_future(self._source.reload())
        if reason is None:
            return web.json_response({"applied": True})
        return web.json_response({"applied": False, "reason": reason}, status=409)

    async def _watch(self, request: web.Request) -> web.WebSocketResponse:
        """A dashboard: the status every second as text, new snapshots as bytes.

        A snapshot is the length of a JSON head (four bytes, big-endian), the head and a JPEG. A slow reader gets fewer.
        """
        if len(self._dashboards) >= MAX_CLIENTS:
            raise web.HTTPServiceUnavailable(reason=f"{MAX_CLIENTS} dashboards are open already")
        dashboard = web.WebSocketResponse(heartbeat=20, max_msg_size=MAX_BODY_BYTES, compress=False)
        dashboard.headers.update(HEADERS)
        await dashboard.prepare(request)
        self._dashboards.add(dashboard)
        sending = asyncio.create_task(self._send_updates(dashboard))
        try:
            async for message in dashboard:  # a dashboard sends nothing
                if message.type is WSMsgType.ERROR:
                    break
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await sending
            self._dashboards.discard(dashboard)
        return dashboard

    async def _send_updates(self, dashboard: web.WebSocketResponse) -> None:
        sent: dict[str, tuple[int, float | None]] = {}
        cameras: list[str] = []
        status_at = -STATUS_INTERVAL_S
        while not dashboard.closed:
            now = time.monotonic()
            if now - status_at >= STATUS_INTERVAL_S:
                status_at, status = now, self._source.status()
                cameras = [camera.id for camera in status.cameras]
                await dashboard.send_str(status.model_dump_json())
            for camera in cameras:
                snapshot = self._snapshot(camera)
                if snapshot is None or sent.get(camera) == (snapshot.frame, snapshot.answered_at):
                    continue
                sent[camera] = snapshot.frame, snapshot.answered_at
                jpeg = await asyncio.to_thread(snapshot.jpeg)
                head = json.dumps({"camera": camera, "sent_at": time.time(), **snapshot.to_json()}).encode()
                await dashboard.send_bytes(len(head).to_bytes(4, "big") + head + jpeg)
            await asyncio.sleep(max(0.0, SNAPSHOT_INTERVAL_S - (time.monotonic() - now)))

    def _snapshot(self, camera: str) -> Snapshot | None:
        with contextlib.suppress(KeyError):  # the camera may be gone after a reload
            return self._source.snapshot(camera)
        return None

    async def _record_history(self, _: web.Application) -> AsyncIterator[None]:
        async def record() -> None:
            while True:
                self._history.add(time.time(), self._source.status())
                await asyncio.sleep(HISTORY_INTERVAL_S)

        recording = asyncio.create_task(record())
        yield
        recording.cancel()

    async def _close_dashboards(self, _: web.Application) -> None:
        for dashboard in list(self._dashboards):
            await dashboard.close(code=1001, message=b"the box stops")


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object", "required": list(properties), "additionalProperties": False, "properties": properties,
    }  # fmt: skip


def _read_page(name: str) -> bytes:
    return resources.files(edge_runtime.http).joinpath("page").joinpath(name).read_bytes()
