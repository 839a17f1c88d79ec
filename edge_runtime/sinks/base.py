"""What a sink is: the keys of its config, the thing that takes results, and the registry of kinds."""

from __future__ import annotations

import errno
import http.client
import json
import math
import os
import re
import socket
import ssl
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict

from gemel.models.errors import InputError
from gemel.models.files.io import MAX_VALUES, read_bounded, validate
from gemel.models.plugins import Registry

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Self

RECORD_BYTES, DETECTION_BYTES, VALUE_BYTES = 2000, 600, 8
"""Approximate Python memory of a record, of one detection in it, and of one value of a tensor."""

MAX_PEM_BYTES = 1 << 20


class Undelivered(str, Enum):
    """Why a result was not delivered."""

    __str__ = str.__str__

    BLOCKED = "blocked"
    DISK_FULL = "disk_full"
    ERROR = "error"
    GONE = "gone"
    INVALID = "invalid"
    NOT_FOUND = "not_found"
    OVERFLOW = "overflow"
    REFUSED = "refused"
    SERVER_ERROR = "server_error"
    STOPPED = "stopped"
    THROTTLED = "throttled"
    TIMEOUT = "timeout"
    UNAUTHORIZED = "unauthorized"
    UNREACHABLE = "unreachable"
    UNWRITABLE = "unwritable"


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}


class SharedForms:
    """A message as JSON and as JPEG, each made by the first sink that asks, for all. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._forms = threading.Lock(), dict[str, Any]()

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """The form of this name."""
        with self._lock:
            if name not in self._forms:
                self._forms[name] = make()
            return self._forms[name]


@dataclass(frozen=True, slots=True, eq=False)
class ResultMessage:
    """A result record (`edge_runtime.frames.results.result_record`) and its RGB frame (H, W, 3); sinks share both."""

    record: Mapping[str, Any]
    image: np.ndarray | None = None
    captured_at: float = 0.0
    """When the frame was captured, in seconds of the schedule's clock."""
    weak: Sequence[Mapping[str, Any]] = ()
    """Detections below the query's least score, for tracking alone; no sink gets them."""
    forms: SharedForms = field(default_factory=SharedForms)

    @property
    def nbytes(self) -> int:
        """Approximate bytes of memory."""
        detections = DETECTION_BYTES * len(self.record.get("detections", ()))
        masks = sum(DETECTION_BYTES + len(one["mask"]["counts"]) for one in self.record.get("segments", ()))
        values = sum(min(math.prod(one["shape"]), MAX_VALUES) for one in self.record.get("outputs", ()))
        packed = len(self.record.get("embedding", "")) + VALUE_BYTES * values
        return RECORD_BYTES + detections + masks + packed + (0 if self.image is None else self.image.nbytes)

    def without_image(self) -> ResultMessage:
        """The record alone."""
        return self if self.image is None else replace(self, image=None)

    def to_text(self) -> str:
        """The record as one line of JSON; DeliveryError for a number that JSON cannot hold."""
        try:
            return self.forms.get("json", lambda: json.dumps(self.record, allow_nan=False, separators=(",", ":")))
        except ValueError as error:
            raise DeliveryError(Undelivered.INVALID, str(error), permanent=True) from error


@dataclass(frozen=True, slots=True)
class BoxState:
    """Whether each camera of the box streams, the camera of each query, the kinds of its events by name, what holds for
    it at present (`Runtime.settings`), and where an update is, if the box pulls any."""

    streams: Mapping[str, bool] = field(default_factory=dict)
    cameras: Mapping[str, str] = field(default_factory=dict)
    events: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    update: Mapping[str, Any] | None = None


CAMERA, QUERY = "camera", "query"
Switch = Callable[[str, str, bytes, str], object]
"""Takes CAMERA or QUERY, its name, what is to hold for it as JSON, and who asks."""


class DeliveryError(Exception):
    """A sink did not take a message.

    `delivered` messages of the batch were taken before it. `permanent`: this message is never taken, and not retried.
    `answered`: the sink works and rejects this message, so a limited number of retries follows. `keeps_open`: the
    connection is still good. `wait_s` is how long the sink asks to be left alone.
    """

    def __init__(
        self,
        reason: Undelivered,
        message: str,
        delivered: int = 0,
        permanent: bool = False,
        answered: bool = False,
        keeps_open: bool = False,
        wait_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.wait_s = wait_s
        self.reason, self.delivered, self.permanent, self.answered = reason, delivered, permanent, answered
        self.keeps_open = keeps_open or permanent


class SinkClosed(Exception):
    """The reader of this sink is gone for good."""


class Sink(ABC):
    """Takes results; called from one thread of its own, which may block.

    After any exception the sink is closed, reopened and retried (`DeliveryError` says more, `SinkClosed` ends it).
    """

    batch = 1
    """Messages taken at once."""
    switch: Switch = staticmethod(lambda kind, name, order, by: None)
    """Called, from any thread, where someone orders something of a camera or query."""

    def connect(self) -> None:  # noqa: B027 (not every kind has something to do)
        """Connect without sending anything."""

    def open(self) -> None:
        """Open files and connections: before the first message, after an error, and on a reopen."""
        self.connect()

    @abstractmethod
    def write(self, messages: Sequence[ResultMessage]) -> None:
        """Deliver all of these, at most `batch`."""

    def report_state(self, state: BoxState) -> None:  # noqa: B027
        """Called about once a second, and once a sink is open, with the present state of the box."""

    def heartbeat(self) -> None:  # noqa: B027
        """Called about once a second while idle; raises where the connection is lost."""

    def close(self) -> None:  # noqa: B027
        """Close files and connections."""


class SinkConfig(BaseModel):
    """The keys of one sink in a box config; each kind adds its own, and a default for `kind`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reach_timeout_s: ClassVar[float] = 11.0
    """How long `check_reachable` may take."""

    kind: str

    @property
    def name(self) -> str:
        """The destination for the log, without secrets."""
        return self.kind

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that it writes."""
        return ()

    @property
    def secret_file(self) -> Path | None:
        """The file of a private key."""
        return None

    @property
    def wants_images(self) -> bool:
        """Whether messages keep their frame."""
        return False

    def resolve(self, root: Path, box: str | None) -> Self:
        """The config with its paths relative to `root` made absolute; `box` is the box's name, if it has one."""
        return self

    def topic_problem(self, cameras: Mapping[str, str]) -> tuple[str, str] | None:
        """Why the results of these queries, each with its camera, cannot be told apart, and a hint."""
        return None

    @abstractmethod
    def build(self) -> Sink:
        """The sink, not yet open."""

    def check(self) -> None:
        """Raise InputError, in one line, where it can never be opened."""

    def check_reachable(self) -> str | None:
        """Why it takes no results at present, or None; sends nothing that looks like a result."""
        sink = self.build()
        try:
            sink.connect()
        except DeliveryError as error:
            return str(error)
        except (OSError, ValueError) as error:
            return f"it does not answer: {getattr(error, 'strerror', None) or error}"
        finally:
            sink.close()
        return None


SINKS: Registry[type[SinkConfig]] = Registry("gemel.sinks", "sink", SinkConfig)


def host_name() -> str:
    """The name of a box that is given none."""
    return re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname()).strip("-") or "box"


def parse_sinks(
    path: Path, given: Sequence[Mapping[str, Any]], root: Path, box: str | None = None
) -> tuple[SinkConfig, ...]:
    """The sinks of the config at `path`, file names relative to `root`; InputError for an unknown kind or key.

    `box` is the box's name where the config has one.
    """
    return tuple(_parse_sink(path, keys, f"sinks[{index}]").resolve(root, box) for index, keys in enumerate(given))


def _parse_sink(path: Path, given: Mapping[str, Any], key: str) -> SinkConfig:
    kind = given.get("kind")
    if kind is None:
        raise InputError(path, "this key is missing", f"choose one of: {', '.join(SINKS.names)}", f"{key}.kind")
    return validate(path, given, SINKS.find(str(kind), path, f"{key}.kind"), key)


def check_authorities(ca: object | None, url: str) -> None:
    """Raise ValueError where `ca` names authorities of HTTPS and the address is not HTTPS."""
    if ca is not None and urlsplit(url).scheme != "https":
        raise ValueError("`ca` names authorities of HTTPS, and `url` is http://: use https://, or leave `ca` out")


def client_context(ca: Path | None, cert: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """A TLS context that trusts the system's authorities, or those of a file alone; InputError for unusable files."""
    hint = "give PEM files: the authority's certificates, and a certificate with its own key"
    for path in (ca, cert, key):
        if path is not None:
            read_bounded(path, MAX_PEM_BYTES, hint)
    try:
        context = ssl.create_default_context(cafile=None if ca is None else os.fspath(ca))
    except (ssl.SSLError, OSError) as error:
        raise InputError(ca or "", "holds no certificate of an authority", hint) from error
    if cert is not None:
        try:
            context.load_cert_chain(cert, key, lambda: "")
        except (ssl.SSLError, OSError) as error:
            raise InputError(cert, "does not belong to its key, or one of them is no PEM file", hint) from error
    return context


def to_delivery_error(error: Exception) -> DeliveryError:
    """Any exception of a sink as a DeliveryError."""
    if isinstance(error, DeliveryError):
        return error
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    text = error.strerror if isinstance(error, OSError) and error.filename is None else None
    return DeliveryError(_undelivered_reason(cause), text or str(error) or type(error).__name__)


def _undelivered_reason(error: BaseException) -> Undelivered:
    if isinstance(error, TimeoutError):
        return Undelivered.TIMEOUT
    if isinstance(error, OSError):
        full = Undelivered.DISK_FULL if error.errno in FULL else Undelivered.UNREACHABLE
        return Undelivered.UNWRITABLE if error.errno in UNWRITABLE else full
    return Undelivered.UNREACHABLE if isinstance(error, http.client.HTTPException) else Undelivered.ERROR
