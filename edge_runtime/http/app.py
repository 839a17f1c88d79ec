"""The HTTP service of a box: aiohttp in a thread of its own, which never makes the inference wait."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import WSMsgType, web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from edge_runtime.http.auth import COOKIE, Access
from edge_runtime.http.metrics import CONTENT_TYPE, Metrics
from edge_runtime.http.snapshots import Snapshot
from edge_runtime.http.status import Readiness, ReloadOutcome, Status
from models.errors import InputError

if TYPE_CHECKING:
    from edge_runtime.live_status import RuntimeStatus

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
PAGE = Path(__file__).parent / "page"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
TEXT, JSON, HTML, JPEG = "text/plain", "application/json", "text/html", "image/jpeg"
REFUSALS = {401: ("a token is needed", TEXT), 403: ("refused", TEXT)}

log = logging.getLogger("gemel.run")
silent = logging.getLogger("gemel.run.http")
"""aiohttp would log a traceback for malformed requests, which anybody can send."""
silent.setLevel(logging.CRITICAL)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Route:
    """One path of the service and its documentation: by status a description, and a media type or a model of JSON."""

    method: str
    path: str
    handler: Handler
    summary: str
    responses: Mapping[int, tuple[str, str | type[BaseModel] | None]]


def openapi_document(routes: list[Route]) -> dict[str, Any]:
    """The document of `/openapi.json` (OpenAPI 3.1)."""
    models = {media for route in routes for _, media in route.responses.values() if isinstance(media, type)}
    references, definitions = models_json_schema(
        [(model, "validation") for model in sorted(models, key=str)], ref_template="#/components/schemas/{model}"
    )

    def describe(text: str, media: str | type[BaseModel] | None) -> dict[str, Any]:
        if media is None:
            return {"description": text}
        if isinstance(media, type):
            return {"description": text, "content": {JSON: {"schema": references[media, "validation"]}}}
        schema = {"type": "object" if media == JSON else "string"}
        return {"description": text, "content": {media: {"schema": schema}}}

    paths: dict[str, Any] = {}
    for route in routes:
        operation: dict[str, Any] = {
            "summary": route.summary,
            "security": [{"token": []}] if route.method == "POST" else [{}, {"token": []}],
            "responses": {
                str(code): describe(*known) for code, known in sorted({**REFUSALS, **route.responses}.items())
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
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


class History:
    """The status of the last hour, one sample every few seconds."""

    def __init__(self) -> None:
        self._rows: deque[tuple[float, int, int, float | None, int]] = deque(maxlen=HISTORY_ROWS)

    def add(self, unix_s: float, status: Status) -> None:
        """Add a sample."""
        ages = [query.age_p95_ms for query in status.queries if query.age_p95_ms is not None]
        dropped = sum(sum(query.ledger.dropped.values()) for query in status.queries)
        row = round(unix_s, 1), status.resident_bytes, status.workspace_bytes, max(ages, default=None), dropped
        self._rows.append(row)

    def to_json(self) -> dict[str, list[Any]]:
        """The columns, oldest sample first; null where a sample has no age."""
        return {name: [row[index] for row in self._rows] for index, name in enumerate(HISTORY_COLUMNS)}


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

    def __init__(self, source: RuntimeStatus, metrics: Metrics, access: Access, where: str | Path) -> None:
        self._app = BoxApp(source, metrics, access)
        self._access, self._where = access, where
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
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
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # its loop was closed meanwhile
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(TIMEOUT_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if not self._opened.done():
                self._opened.set_exception(error)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        runner = web.AppRunner(self._app.application(), access_log=None, shutdown_timeout=0.5, logger=silent)
        await runner.setup()
        try:
            host, port = self._access.host, self._access.port
            server = await self._loop.create_server(lambda: _protocol(runner), host, port)
            self.port = server.sockets[0].getsockname()[1]
            self._opened.set_result(None)
            await self._stopping.wait()
            server.close()
        finally:
            await asyncio.wait_for(runner.cleanup(), TIMEOUT_S / 2)


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

    def __init__(self, source: RuntimeStatus, metrics: Metrics, access: Access) -> None:
        self._source, self._metrics, self.access = source, metrics, access
        self._history = History()
        self._dashboards: set[web.WebSocketResponse] = set()
        self._routes = [
            Route("GET", "/", self._index, "The dashboard.",
                  {200: ("the page", HTML), 401: ("asks for the token", HTML)}),
            Route("GET", "/healthz", self._health, "Whether the thread that runs queries goes on.",
                  {200: ("it does", TEXT), 503: ("it does not", TEXT)}),
            Route("GET", "/readyz", self._ready, "Whether the box is ready.",
                  {200: ("it is", Readiness), 503: ("what is missing", Readiness)}),
            Route("GET", "/metrics", self._metrics_text, "Metrics for Prometheus.", {200: ("text format 0.0.4", TEXT)}),
            Route("GET", "/api/status", self._status, "The box at this moment.", {200: ("the box", Status)}),
            Route("GET", "/api/history", self._last_hour, "The last hour, in columns.", {200: ("the columns", JSON)}),
            Route("GET", "/api/cameras/{id}/frame.jpg", self._frame, "A camera's newest frame with its results.",
                  {200: ("the frame", JPEG), 404: ("no such camera, or no frame yet", TEXT)}),
            Route("POST", "/api/session", self._session, "Store the token of the request in a cookie.",
                  {204: ("done", None)}),
            Route("POST", "/api/reload", self._reload, "Reload config and bundle.",
                  {200: ("applied", ReloadOutcome), 409: ("not applied, and why", ReloadOutcome)}),
            Route("GET", "/openapi.json", self._openapi, "This document.", {200: ("the document", JSON)}),
        ]  # fmt: skip
        self._schema = openapi_document(self._routes)

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._record_history)
        app.on_shutdown.append(self._close_dashboards)
        for route in self._routes:
            app.router.add_route(route.method, route.path, route.handler)
            if route.method == "GET":
                app.router.add_head(route.path, route.handler)
        app.router.add_get("/api/watch", self._watch)
        app.router.add_static("/page", PAGE)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check access, add the headers of every response, and hide tracebacks."""
        is_read = request.method in ("GET", "HEAD")
        refusal = self.access.check(request.method, request.headers, is_read and request.path.startswith("/page/"))
        try:
            if refusal is None:
                response = await handler(request)
            elif refusal[0] == 401 and request.path == "/" and is_read:
                response = web.Response(status=401, text=(PAGE / "login.html").read_text("utf-8"), content_type=HTML)
            else:
                challenge = {"WWW-Authenticate": "Bearer"} if refusal[0] == 401 else {}
                response = web.Response(status=refusal[0], text=refusal[1], headers=challenge)
        except web.HTTPException as error:
            allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            response = web.Response(status=error.status, text=error.reason, headers=allow)
        except Exception:
            log.exception("HTTP %s %s failed", request.method, request.path[:200])
            response = web.Response(status=500, text="internal error: see the log of the box")
        if not response.prepared:
            response.headers.update({key: text for key, text in HEADERS.items() if key not in response.headers})
        return response

    async def _index(self, _: web.Request) -> web.FileResponse:
        return web.FileResponse(PAGE / "index.html")

    async def _health(self, _: web.Request) -> web.Response:
        is_moving, problem = self._source.is_moving(), self._source.bundle_problem()
        lines = ["moving" if is_moving else "stuck", *([] if problem is None else [f"bundle: {problem}"]), ""]
        return web.Response(status=200 if is_moving else 503, text="\n".join(lines))

    async def _ready(self, _: web.Request) -> web.Response:
        readiness = Readiness(missing=self._source.missing())
        return _json_response(readiness, 503 if readiness.missing else 200)

    async def _metrics_text(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.to_text(self._source.status), headers={"Content-Type": CONTENT_TYPE})

    async def _openapi(self, _: web.Request) -> web.Response:
        return web.json_response(self._schema)

    async def _status(self, _: web.Request) -> web.Response:
        return _json_response(self._source.status())

    async def _last_hour(self, _: web.Request) -> web.Response:
        return web.json_response(self._history.to_json())

    async def _frame(self, request: web.Request) -> web.Response:
        try:
            snapshot = self._source.snapshot(request.match_info["id"])
        except KeyError:
            raise web.HTTPNotFound(reason="no such camera") from None
        if snapshot is None:
            raise web.HTTPNotFound(reason="no frame of this camera yet")
        return web.Response(body=await asyncio.to_thread(snapshot.jpeg), content_type=JPEG)

    async def _session(self, _: web.Request) -> web.Response:
        """The request had the token: the dashboard keeps it in a cookie that scripts cannot read."""
        response = web.Response(status=204)
        response.set_cookie(COOKIE, self.access.token or "", httponly=True, samesite="Strict", path="/")
        return response

    async def _reload(self, _: web.Request) -> web.Response:
        """Responds when the reload is over, which takes seconds."""
        reason = await asyncio.wrap_future(self._source.reload())
        outcome = ReloadOutcome(applied=reason is None, reason=reason)
        return web.json_response(outcome.model_dump(exclude_none=True), status=200 if outcome.applied else 409)

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
                if snapshot is None or sent.get(camera) == snapshot.key:
                    continue
                sent[camera] = snapshot.key
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


def _json_response(value: BaseModel, status: int = 200) -> web.Response:
    return web.Response(text=value.model_dump_json(), content_type=JSON, status=status)
