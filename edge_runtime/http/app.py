"""The HTTP service of a box: aiohttp in a thread of its own, which never makes the inference wait."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import random
import re
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from aiohttp import HttpVersion11, WSMsgType, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gemel.edge_runtime.backoff import BackOff
from gemel.edge_runtime.events.clips import CLIP, SNAPSHOT
from gemel.edge_runtime.http.auth import Access
from gemel.edge_runtime.http.connections import CROWDED, HEALTH_PATHS, Connections, NoPlace, open_sockets, silent
from gemel.edge_runtime.http.failures import Broken, HttpFailures
from gemel.edge_runtime.http.metrics import CONTENT_TYPE, Metrics
from gemel.edge_runtime.http.push import MODEL, VERSION, PushApi, refuse_access
from gemel.edge_runtime.http.sessions import SESSION_S, Sessions, cookie_name
from gemel.edge_runtime.http.snapshots import Snapshot
from gemel.edge_runtime.http.status import EventList, Readiness, ReloadOutcome, Status, TlsStatus
from gemel.edge_runtime.http.tls import Certificate
from gemel.edge_runtime.life.switches import CameraSwitch, QuerySwitch
from gemel.edge_runtime.sinks.base import CAMERA, QUERY
from gemel.models.errors import InputError

if TYPE_CHECKING:
    from gemel.edge_runtime.life.live_status import RuntimeStatus

SNAPSHOT_INTERVAL_S, STATUS_INTERVAL_S = 0.2, 1.0
MAX_CLIENTS = 16
"""Dashboards open at once."""
MAX_BODY_BYTES = 4096
TIMEOUT_S = 2.0
HISTORY_INTERVAL_S, HISTORY_S = 5.0, 3600.0
HISTORY_ROWS = round(HISTORY_S / HISTORY_INTERVAL_S)
HISTORY_COLUMNS = (
    "at",
    "resident_bytes",
    "workspace_bytes",
    "age_p95_ms",
    "dropped",
    "dropped_share",
    "asked_fps",
    "fps",
)
"""`at` in Unix seconds; `age_p95_ms` is the worst query's; `dropped` are frames since the start; `dropped_share` is of
the last minute; `asked_fps` and `fps` are sums over the queries."""
PAGE = Path(__file__).parent / "page"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "media-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
TEXT, JSON, HTML, JPEG, MP4 = "text/plain", "application/json", "text/html", "image/jpeg", "video/mp4"
CONTINUE = "100-continue"
REFUSALS = {401: ("a token is needed", TEXT), 403: ("refused", TEXT)}

log = logging.getLogger("gemel.run")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Responses = Mapping[int, tuple[str, str | type[BaseModel] | None]]


@dataclass(frozen=True)
class Route:
    """One path of the service and its documentation: by status a description, and a media type or a model of JSON.

    A `body` is such a model, too."""

    method: str
    path: str
    handler: Handler
    summary: str
    responses: Responses
    body: type[BaseModel] | None = None


def openapi_document(routes: list[Route]) -> dict[str, Any]:
    """The document of `/openapi.json` (OpenAPI 3.1)."""
    models = {media for route in routes for _, media in route.responses.values() if isinstance(media, type)}
    models |= {route.body for route in routes if route.body is not None}
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
        if route.body is not None:
            operation["requestBody"] = {"required": True, **describe("some keys; null: as the config says", route.body)}
        if names := re.findall(r"\{(\w+)\}", route.path):
            text = {"in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [{"name": name, **text} for name in names]
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
        self._rows: deque[tuple[float | None, ...]] = deque(maxlen=HISTORY_ROWS)

    def add(self, unix_s: float, status: Status) -> None:
        """Add a sample."""
        ages = [query.age_p95_ms for query in status.queries if query.age_p95_ms is not None]
        dropped = sum(sum(query.ledger.dropped.values()) for query in status.queries)
        rates = (round(sum(getattr(query, key) for query in status.queries), 2) for key in ("asked_fps", "fps"))
        self._rows.append((
            round(unix_s, 1), status.resident_bytes, status.workspace_bytes, max(ages, default=None), dropped,
            status.dropped_share, *rates,
        ))  # fmt: skip

    def to_json(self) -> dict[str, list[Any]]:
        """The columns, oldest sample first; null where a sample has no age."""
        return {name: [row[index] for row in self._rows] for index, name in enumerate(HISTORY_COLUMNS)}


PASSING_ERRNOS = {errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.ENETDOWN, errno.ENETUNREACH, errno.ENODEV}
"""Errors of an address that pass by themselves: a network that is not up yet, a program that still ends."""
BIND_BACK_OFF = BackOff(0.5, 10.0)


def address_problem(access: Access) -> tuple[str, bool] | None:
    """Why the address is not available at present, and whether that can pass by itself; None where it is."""
    try:
        for one in open_sockets(access.host, access.port):
            one.close()
    except OSError as error:
        return _describe_address(access, error), _can_pass(error)
    return None


def check_address(access: Access, where: str | Path) -> None:
    """Raise InputError, naming the config, where the address can never be used by this process."""
    problem = address_problem(access)
    if problem is not None and not problem[1]:
        raise InputError(where, problem[0], "give another address", "http.bind")


def _can_pass(error: OSError) -> bool:
    return isinstance(error, socket.gaierror) or error.errno in PASSING_ERRNOS


def _describe_address(access: Access, error: OSError) -> str:
    return f"{access.host}:{access.port} is not available: {error.strerror or error}"


class HttpService:
    """Serves a box's status, metrics, snapshots and dashboard until it is stopped; `where` names the config."""

    def __init__(self, source: RuntimeStatus, metrics: Metrics, access: Access, where: str | Path) -> None:
        certificate = None if access.tls is None else Certificate(access.tls)
        self._app = BoxApp(source, metrics, access, certificate)
        self._access, self._where = access, where
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._tried: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self.port = access.port

    def start(self) -> None:
        """Begin to serve. An address that is not available yet is tried again; InputError where it never will be.

        Port 0 takes a free one (`port`).
        """
        self._thread.start()
        try:
            self._tried.result()
        except OSError as error:
            problem = _describe_address(self._access, error)
            raise InputError(self._where, problem, "give another address", "http.bind") from error

    def set_access(self, access: Access) -> None:
        """Use another token, other names and files of TLS."""
        if access.tls != self._app.access.tls:
            self._app.certificate = None if access.tls is None else Certificate(access.tls)
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
            if not self._tried.done():
                self._tried.set_exception(error)
            elif not isinstance(error, asyncio.CancelledError):
                log.exception("HTTP has ended")

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        runner = web.AppRunner(
            self._app.application(), access_log=None, shutdown_timeout=0.5, logger=silent, handler_cancellation=True
        )
        await runner.setup()
        try:
            assert runner.server is not None
            connections = Connections(runner.server, self._app.is_proxy, self._app.tls_context, self._app.failures)
            self._app.connections = connections
            sockets = await self._open_sockets()
            connections.listen(sockets)
            if sockets:
                self.port = sockets[0].getsockname()[1]
                scheme = "http" if self._access.tls is None else "https"
                log.info("dashboard at %s://%s:%d/", scheme, self._access.host, self.port)
            self._note_tried()
            await self._stopping.wait()
            connections.close()
        finally:
            await asyncio.wait_for(runner.cleanup(), TIMEOUT_S / 2)

    async def _open_sockets(self) -> list[socket.socket]:
        """The listening sockets, as soon as the address is available; none where the service stops before."""
        failures = 0
        while not self._stopping.is_set():
            try:
                return await asyncio.to_thread(open_sockets, self._access.host, self._access.port)
            except OSError as error:
                if not _can_pass(error):
                    raise
                failures += 1
                if failures == 1:
                    log.warning("%s; HTTP tries again, the box serves", _describe_address(self._access, error))
                self._note_tried()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), BIND_BACK_OFF.wait_s(failures, random.random()))
        return []

    def _note_tried(self) -> None:
        if not self._tried.done():
            self._tried.set_result(None)


class BoxApp:
    """The routes and their handlers."""

    def __init__(
        self, source: RuntimeStatus, metrics: Metrics, access: Access, certificate: Certificate | None = None
    ) -> None:
        self._source, self._metrics, self.access, self.certificate = source, metrics, access, certificate
        self.connections: Connections | None = None
        self.failures = HttpFailures(metrics)
        self._sessions = Sessions()
        self._push = PushApi(source, lambda: self.access, self._is_proven)
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
            Route("GET", "/api/events", self._events, "The newest events, newest first.",
                  {200: ("the events", EventList)}),
            Route("GET", "/api/events/{id}/snapshot.jpg", self._thumbnail, "The snapshot of an event, 240 pixels wide.",
                  {200: ("the picture", JPEG), 404: ("no such event, or no snapshot of it", TEXT)}),
            Route("GET", "/api/events/{id}/full.jpg", self._full_snapshot, "The whole picture of an ended event.",
                  {200: ("the picture", JPEG), 404: ("no such event, or it was not kept", TEXT)}),
            Route("GET", "/api/events/{id}/clip.mp4", self._clip, "Some seconds before, in and after an event.",
                  {200: ("the clip", MP4), 206: ("a part of it", MP4), 404: ("none, or not yet", TEXT),
                   416: ("no such part", TEXT)}),
            Route("GET", "/api/history", self._last_hour, "The last hour, in columns.", {200: ("the columns", JSON)}),
            Route("GET", "/api/cameras/{id}/frame.jpg", self._frame, "A camera's newest frame with its results.",
                  {200: ("the frame", JPEG), 404: ("no such camera, or no frame yet", TEXT)}),
            Route("POST", "/api/session", self._session, "Begin a session: a cookie in place of the token.",
                  {204: ("done", None)}),
            Route("POST", "/api/reload", self._reload, "Reload config and bundle.",
                  {200: ("applied", ReloadOutcome), 409: ("not applied, and why", ReloadOutcome)}),
            Route("POST", "/api/rollback", self._roll_back, "Let the bundle before the last update serve again.",
                  {200: ("it serves", ReloadOutcome), 409: ("there is none, and why", ReloadOutcome)}),
            Route("POST", "/api/queries/{id}", self._order_query, "Switch a query, or set its rate, scores and zones.",
                  {200: ("what is set of it", QuerySwitch), 400: ("it does not fit", TEXT),
                   404: ("no such query", TEXT)}, QuerySwitch),
            Route("POST", "/api/cameras/{id}", self._order_camera, "Switch all queries of a camera, or set their rate.",
                  {200: ("what is set of it", CameraSwitch), 400: ("it does not fit", TEXT),
                   404: ("no such camera", TEXT)}, CameraSwitch),
            *_push_routes(self._push),
            Route("GET", "/openapi.json", self._openapi, "This document.", {200: ("the document", JSON)}),
        ]  # fmt: skip
        self._schema = openapi_document(self._routes)

    def is_proxy(self, address: str) -> bool:
        """Whether this address is that of a trusted proxy."""
        return self.access.is_proxy(address)

    def tls_context(self) -> ssl.SSLContext | None:
        """The TLS context in force."""
        return None if self.certificate is None else self.certificate.context

    def _read_status(self) -> Status:
        """The box at this moment, with its certificate."""
        status, certificate = self._source.status(), self.certificate
        if certificate is None:
            return status
        return status.model_copy(
            update={"tls": TlsStatus(expires_at=certificate.expires_at, warning=certificate.warning)}
        )

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._record_history)
        app.on_response_prepare.append(_leave_out_server)
        app.on_shutdown.append(self._close_dashboards)
        app.on_cleanup.append(self._close_push)
        for route in self._routes:
            app.router.add_route(route.method, route.path, route.handler, expect_handler=self._ask_for_body)
            if route.method == "GET":
                app.router.add_head(route.path, route.handler)
        app.router.add_get("/api/watch", self._watch)
        app.router.add_static("/page", PAGE)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Mark the connection as in use while the request is answered, and count what fails."""
        try:
            with contextlib.nullcontext() if self.connections is None else self.connections.request(request):
                response = await self._answer(request, handler)
        except NoPlace:
            response = web.Response(status=503, text=CROWDED, headers={hdrs.RETRY_AFTER: "5"})
            response.force_close()
        except asyncio.CancelledError:
            self.failures.note_broken(Broken.DISCONNECTED)
            raise
        self.failures.note_status(response.status)
        if not response.prepared:
            response.headers.update({key: text for key, text in HEADERS.items() if key not in response.headers})
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check access, and hide tracebacks."""
        refusal = self._check_access(request)
        try:
            if refusal is None:
                return await handler(request)
            return _refuse(request, *refusal)
        except web.HTTPException as error:
            allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            response = refuse_access(request.path, error.status, error.reason)
            response = response or web.Response(status=error.status, text=error.reason)
            response.headers.update(allow)
            return response
        except ConnectionError:
            self.failures.note_broken(Broken.DISCONNECTED)
            return web.Response(status=400, text="the connection broke off")
        except (web.RequestPayloadError, HttpProcessingError):
            self.failures.note_broken(Broken.MALFORMED)
            return web.Response(status=400, text="the body is damaged")
        except Exception:
            log.exception("HTTP %s %s failed", request.method, request.path[:200])
            return web.Response(status=500, text="internal error: see the log of the box")

    def _check_access(self, request: web.Request) -> tuple[int, str] | None:
        """The status and the reason of a refusal, from the head alone; None where the handler may read the body."""
        is_public = request.path.startswith("/page/") or request.path in HEALTH_PATHS
        refusal = self._refusal(request, is_public=_is_read(request) and is_public)
        if refusal is not None and refusal[0] == 401 and request.method == "POST" and request.path.startswith("/v1/"):
            return None  # the form may hold the token: its handler reads it within bounds of their own
        return refusal

    def _refusal(self, request: web.Request, is_public: bool = False) -> tuple[int, str] | None:
        has_session = self._has_session(request)
        return self.access.check(request.method, request.headers, is_public, request.remote, has_session)

    def _has_session(self, request: web.Request) -> bool:
        access, headers = self.access, request.headers
        is_https = access.is_https(headers, request.remote)
        return access.token is not None and self._sessions.has_session(headers, access.token, is_https)

    def _is_proven(self, request: web.Request) -> bool:
        """Whether the head of a request shows the token, or a session."""
        return self.access.has_token(request.headers) or self._has_session(request)

    async def _ask_for_body(self, request: web.Request) -> None:
        """Let a client send the body that it holds back, unless the head is refused anyway."""
        is_held_back = request.version >= HttpVersion11 and request.headers.get(hdrs.EXPECT, "").lower() == CONTINUE
        if is_held_back and self._check_access(request) is None:
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0

    async def _index(self, _: web.Request) -> web.FileResponse:
        return web.FileResponse(PAGE / "index.html")

    async def _health(self, request: web.Request) -> web.Response:
        """One word for a request that may not read the status."""
        is_moving = self._source.is_moving()
        problem = None if self._refusal(request) else self._source.bundle_problem()
        lines = ["moving" if is_moving else "stuck", *([] if problem is None else [f"bundle: {problem}"]), ""]
        return web.Response(status=200 if is_moving else 503, text="\n".join(lines))

    async def _ready(self, request: web.Request) -> web.Response:
        missing = self._source.missing()
        status = 503 if missing else 200
        if self._refusal(request):
            return web.Response(status=status, text="not ready\n" if missing else "ready\n")
        cameras = {camera.id: camera.state for camera in self._read_status().cameras}
        return _json_response(Readiness(missing=missing, cameras=cameras), status)

    async def _metrics_text(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.to_text(self._read_status), headers={"Content-Type": CONTENT_TYPE})

    async def _openapi(self, _: web.Request) -> web.Response:
        return web.json_response(self._schema)

    async def _status(self, _: web.Request) -> web.Response:
        return _json_response(self._read_status())

    async def _events(self, _: web.Request) -> web.Response:
        return _json_response(EventList(events=self._source.events()))

    async def _thumbnail(self, request: web.Request) -> web.Response:
        picture = self._source.thumbnail(request.match_info["id"])
        if picture is None:
            raise web.HTTPNotFound(reason="no snapshot of such an event")
        return web.Response(body=picture, content_type=JPEG)

    async def _full_snapshot(self, request: web.Request) -> web.StreamResponse:
        return self._event_file(request, SNAPSHOT)

    async def _clip(self, request: web.Request) -> web.StreamResponse:
        return self._event_file(request, CLIP)

    def _event_file(self, request: web.Request, ending: str) -> web.StreamResponse:
        path = self._source.event_file(request.match_info["id"], ending)
        if path is None:
            raise web.HTTPNotFound(reason="nothing was kept of such an event, or not yet")
        return web.FileResponse(path)

    async def _last_hour(self, _: web.Request) -> web.Response:
        return web.json_response(self._history.to_json())

    async def _frame(self, request: web.Request) -> web.Response:
        try:
            snapshot = self._source.snapshot(request.match_info["id"])
        except KeyError:
            raise web.HTTPNotFound(reason="no such camera") from None
        if snapshot is None:
            raise web.HTTPNotFound(reason="no frame of this camera yet")
        is_plain = request.query.get("plain", "0") != "0"
        return web.Response(body=await asyncio.to_thread(snapshot.jpeg, is_plain), content_type=JPEG)

    async def _session(self, request: web.Request) -> web.Response:
        """The request had the token: the dashboard keeps a session in a cookie that scripts cannot read."""
        response = web.Response(status=204)
        is_https = self.access.is_https(request.headers, request.remote)
        response.set_cookie(
            cookie_name(is_https), self._sessions.issue_value(self.access.token or ""), max_age=SESSION_S,
            httponly=True, samesite="Strict", path="/", secure=is_https,
        )  # fmt: skip
        return response

    async def _reload(self, _: web.Request) -> web.Response:
        """Responds when the reload is over, which takes seconds; it goes on where the client leaves."""
        result = await asyncio.shield(asyncio.wrap_future(self._source.reload()))
        held_back = list(result.held_back)
        applied: bool | Literal["partly"] = "partly" if held_back else result.reason is None
        outcome = ReloadOutcome(applied=applied, held_back=held_back or None, reason=result.reason)
        return _outcome_response(outcome)

    async def _roll_back(self, request: web.Request) -> web.Response:
        log.info("http %s asks for the bundle before the last update", request.remote)
        try:
            await asyncio.shield(asyncio.wrap_future(self._source.roll_back()))
            outcome = ReloadOutcome(applied=True, held_back=None, reason=None)
        except InputError as error:
            outcome = ReloadOutcome(applied=False, held_back=None, reason=str(error))
        return _outcome_response(outcome)

    async def _order_query(self, request: web.Request) -> web.Response:
        return await self._order(request, QUERY)

    async def _order_camera(self, request: web.Request) -> web.Response:
        return await self._order(request, CAMERA)

    async def _order(self, request: web.Request, kind: str) -> web.Response:
        name, by = request.match_info["id"], f"http {request.remote}"
        try:
            value = await asyncio.to_thread(self._source.order, kind, name, await request.read(), by)
        except KeyError:
            return web.Response(status=404, text=f"no such {kind}")
        except InputError as error:
            return web.Response(status=400, text=str(error))
        return _json_response(value)

    async def _watch(self, request: web.Request) -> web.WebSocketResponse:
        """A dashboard: the status every second as text, new snapshots as bytes.

        A snapshot is the length of a JSON head (four bytes, big-endian), the head and a JPEG, with `?plain=1` as the
        camera gave it. A slow reader gets fewer.
        """
        if len(self._dashboards) >= MAX_CLIENTS:
            raise web.HTTPServiceUnavailable(reason=f"{MAX_CLIENTS} dashboards are open already")
        dashboard = web.WebSocketResponse(heartbeat=20, max_msg_size=MAX_BODY_BYTES, compress=False)
        dashboard.headers.update(HEADERS)
        await dashboard.prepare(request)
        self._dashboards.add(dashboard)
        is_plain = request.query.get("plain", "0") != "0"
        sending = asyncio.create_task(self._send_updates(dashboard, is_plain))
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

    async def _send_updates(self, dashboard: web.WebSocketResponse, is_plain: bool) -> None:
        sent: dict[str, tuple[int, float | None]] = {}
        cameras: list[str] = []
        status_at = -STATUS_INTERVAL_S
        while not dashboard.closed:
            now = time.monotonic()
            if now - status_at >= STATUS_INTERVAL_S:
                status_at, status = now, self._read_status()
                cameras = [camera.id for camera in status.cameras]
                await dashboard.send_str(status.model_dump_json())
            for camera in cameras:
                snapshot = self._snapshot(camera)
                if snapshot is None or sent.get(camera) == snapshot.key:
                    continue
                sent[camera] = snapshot.key
                jpeg = await asyncio.to_thread(snapshot.jpeg, is_plain)
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
                if self.certificate is not None:
                    await asyncio.to_thread(self.certificate.poll)
                self._history.add(time.time(), self._read_status())
                await asyncio.sleep(HISTORY_INTERVAL_S)

        recording = asyncio.create_task(record())
        yield
        recording.cancel()

    async def _close_dashboards(self, _: web.Application) -> None:
        for dashboard in list(self._dashboards):
            await dashboard.close(code=1001, message=b"the box stops")

    async def _close_push(self, _: web.Application) -> None:
        self._push.close()


def _is_read(request: web.Request) -> bool:
    return request.method in ("GET", "HEAD")


def _refuse(request: web.Request, status: int, text: str) -> web.Response:
    """A refusal as the client of this path expects it."""
    if (response := refuse_access(request.path, status, text)) is not None:
        return response
    if status == 401 and request.path == "/" and _is_read(request):
        return web.Response(status=401, text=(PAGE / "login.html").read_text("utf-8"), content_type=HTML)
    challenge = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return web.Response(status=status, text=text, headers=challenge)


async def _leave_out_server(_: web.Request, response: web.StreamResponse) -> None:
    """Say no versions."""
    response.headers.pop(hdrs.SERVER, None)


def _push_routes(push: PushApi) -> list[Route]:
    refused: Responses = {400: ("the frame is no picture or does not fit", JSON), 404: ("no such query", JSON),
               413: ("too large", JSON), 429: ("overload: try again after Retry-After", JSON),
               500: ("the query failed on it", JSON), 503: ("it cannot be answered at present", JSON)}  # fmt: skip
    form: Responses = {**refused, 408: ("it came too slowly", JSON), 415: ("no multipart form", JSON)}
    known: Responses = {200: ("it does", None), 503: ("it does not", None)}
    return [
        Route("POST", "/v1/vision/detection", push.detect, "Detect objects in a picture (DeepStack's form).",
              {200: ("success, predictions", JSON), **form}),
        Route("POST", "/v1/vision/custom/list", push.list_custom, "The names for custom.",
              {200: ("success, models", JSON), **form}),
        Route("POST", "/v1/vision/custom/{id}", push.detect_custom, "Ask one query about a picture.",
              {200: ("success, predictions", JSON), **form}),
        Route("GET", "/v2", push.server_metadata, "The server (KServe's v2 protocol).", {200: ("the server", JSON)}),
        Route("GET", "/v2/health/live", push.live, "Whether the thread that runs queries goes on.", known),
        Route("GET", "/v2/health/ready", push.ready, "Whether the box is ready.", known),
        Route("GET", "/v2/models/stats", push.statistics, "Frames answered by query.", {200: ("the counts", JSON)}),
        Route("POST", "/v2/repository/index", push.repository_index, "The queries that take frames by HTTP.",
              {200: ("the models", JSON)}),
        *(route for model in (MODEL, MODEL + VERSION) for route in _model_routes(push, model, known, refused)),
    ]  # fmt: skip


def _model_routes(push: PushApi, model: str, known: Responses, refused: Responses) -> list[Route]:
    gone: Responses = {404: ("no such query", JSON)}
    return [
        Route("GET", model, push.model_metadata, "A query as a model.",
              {200: ("its inputs and outputs", JSON), **gone}),
        Route("GET", f"{model}/stats", push.model_statistics, "Frames that a query answered.",
              {200: ("the counts", JSON), **gone}),
        Route("GET", f"{model}/config", push.model_config, "A query as a model, with Triton's names.",
              {200: ("its configuration", JSON), **gone}),
        Route("GET", f"{model}/ready", push.model_ready, "Whether the query is ready.", {**known, **gone}),
        Route("POST", f"{model}/infer", push.infer, "Ask one query about a frame.",
              {200: ("the outputs", JSON), 408: ("it came too slowly", JSON), **refused}),
    ]  # fmt: skip


def _outcome_response(outcome: ReloadOutcome) -> web.Response:
    return web.json_response(outcome.model_dump(exclude_none=True), status=200 if outcome.applied else 409)


def _json_response(value: BaseModel, status: int = 200) -> web.Response:
    return web.Response(text=value.model_dump_json(), content_type=JSON, status=status)
