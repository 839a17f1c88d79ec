"""What a sink is: the keys of its config, the thing that takes results, and the registry of kinds."""

from __future__ import annotations

import errno
import http.client
import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from models.errors import InputError
from models.io import validate

if TYPE_CHECKING:
    import numpy as np

RECORD_BYTES, DETECTION_BYTES = 2000, 600
"""Approximate Python memory of a record, and of one detection in it."""

SINKS: dict[str, tuple[str, str]] = {
    "jsonl": ("edge_runtime.sinks.jsonl", "JsonLinesKeys"),
    "mqtt": ("edge_runtime.sinks.mqtt", "MqttKeys"),
    "webhook": ("edge_runtime.sinks.webhook", "WebhookKeys"),
}
"""Kind -> module (imported when a config names the kind), and the class of its keys."""


class Undelivered(str, Enum):
    """Why a result was not delivered."""

    __str__ = str.__str__

    BLOCKED = "blocked"
    DISK_FULL = "disk_full"
    ERROR = "error"
    GONE = "gone"
    INVALID = "invalid"
    OVERFLOW = "overflow"
    REFUSED = "refused"
    SERVER_ERROR = "server_error"
    STOPPED = "stopped"
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    UNWRITABLE = "unwritable"


_REASONS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), Undelivered.DISK_FULL),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
        Undelivered.UNWRITABLE,
    ),
}


@dataclass(frozen=True, slots=True, eq=False)
class ResultMessage:
    """A result record (`edge_runtime.results.result_record`) and its RGB frame (H, W, 3); sinks share both."""

    record: Mapping[str, Any]
    image: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """Approximate bytes of memory."""
        detections = DETECTION_BYTES * len(self.record.get("detections", ()))
        return RECORD_BYTES + detections + (0 if self.image is None else self.image.nbytes)

    def without_image(self) -> ResultMessage:
        """The record alone."""
        return self if self.image is None else ResultMessage(self.record)

    def to_text(self) -> str:
        """The record as one line of JSON; DeliveryError for a number that JSON cannot hold."""
        return dump_record(self.record)


class DeliveryError(Exception):
    """A sink did not take a message.

    `delivered` messages of the batch were taken before it. `permanent`: this message is never taken, and not retried.
    `answered`: the sink works and rejects this message, so a limited number of retries follows. `keeps_open`: the
    connection is still good.
    """

    def __init__(
        self,
        reason: Undelivered,
        message: str,
        delivered: int = 0,
        permanent: bool = False,
        answered: bool = False,
        keeps_open: bool = False,
    ) -> None:
        super().__init__(message)
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

    def open(self) -> None:  # noqa: B027 (not every kind has something to do)
        """Open files and connections: before the first message, after an error, and on a reopen."""

    @abstractmethod
    def write(self, messages: Sequence[ResultMessage]) -> None:
        """Deliver all of these, at most `batch`."""

    def heartbeat(self) -> None:  # noqa: B027
        """Called about once a second while idle; raises where the connection is lost."""

    def close(self) -> None:  # noqa: B027
        """Close files and connections."""


class SinkConfig(ABC):
    """One sink of a box config, its paths absolute."""

    reach_timeout_s = 1.0
    """How long `check_reachable` may take."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """The kind of sink, as in the config."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that it writes."""
        return ()

    @property
    def wants_images(self) -> bool:
        """Whether messages keep their frame."""
        return False

    @property
    @abstractmethod
    def name(self) -> str:
        """The destination for the log, without secrets."""

    @abstractmethod
    def build(self) -> Sink:
        """The sink, not yet open."""

    def check(self) -> None:  # noqa: B027
        """Raise InputError, in one line, where it can never be opened."""

    def check_reachable(self) -> str | None:
        """Why it takes no results at present, or None; sends nothing that looks like a result."""
        return None


class SinkKeys(BaseModel):
    """The keys of one sink in a box config; each kind adds its own."""

    model_config = ConfigDict(extra="forbid")

    kind: str

    @abstractmethod
    def to_config(self, root: Path) -> SinkConfig:
        """The keys as plain values, paths relative to `root`."""


def parse_sinks(path: Path, given: Sequence[Mapping[str, Any]], root: Path) -> tuple[SinkConfig, ...]:
    """The sinks of the config at `path`, file names relative to `root`; InputError for an unknown kind or key."""
    return tuple(_parse_keys(path, keys, f"sinks[{index}]").to_config(root) for index, keys in enumerate(given))


def _parse_keys(path: Path, given: Mapping[str, Any], key: str) -> SinkKeys:
    kind = given.get("kind")
    if not isinstance(kind, str) or kind not in SINKS:
        problem = "this key is missing" if kind is None else f"unknown kind '{str(kind)[:40]}'"
        raise InputError(path, problem, f"use {', '.join(SINKS)}", f"{key}.kind")
    module, keys = SINKS[kind]
    return validate(path, given, getattr(importlib.import_module(module), keys), key)


def dump_record(record: Mapping[str, Any]) -> str:
    """A record as one line of JSON; DeliveryError for a number that JSON cannot hold."""
    try:
        return json.dumps(record, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise DeliveryError(Undelivered.INVALID, str(error), permanent=True) from error


def to_delivery_error(error: Exception) -> DeliveryError:
    """Any exception of a sink as a DeliveryError."""
    if isinstance(error, DeliveryError):
        return error
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    text = error.strerror if isinstance(error, OSError) and error.filename is None else None
    return DeliveryError(_reason(cause), text or str(error) or type(error).__name__)


def _reason(error: BaseException) -> Undelivered:
    if isinstance(error, TimeoutError):
        return Undelivered.TIMEOUT
    if isinstance(error, OSError):
        return _REASONS.get(error.errno or 0, Undelivered.UNREACHABLE)
    return Undelivered.UNREACHABLE if isinstance(error, http.client.HTTPException) else Undelivered.ERROR
