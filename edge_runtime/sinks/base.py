"""A parcel: one result on its way, with the frame that it was found in.

What a kind of sink is: the keys that a config may give it, and what takes results once it is open.

The kinds of sinks by name; the file of one is imported when a config asks for it.
"""

from __future__ import annotations

import errno
import http.client
import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from models.errors import InputError
from models.io import validate

if TYPE_CHECKING:
    import numpy as np


# What a record and one detection of it take in Python, about.
RECORD_BYTES, DETECTION_BYTES = 2000, 600


@dataclass(frozen=True, slots=True, eq=False)
class ResultMessage:
    """A record (`edge_runtime.results.result_record`) and, for sinks that carry pictures, its RGB frame (H, W, 3).

    Both are shared between sinks and never changed.
    """

    record: Mapping[str, Any]
    image: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory, about."""
        found = DETECTION_BYTES * len(self.record.get("detections", ()))
        return RECORD_BYTES + found + (0 if self.image is None else self.image.nbytes)

    def lighter(self) -> ResultMessage:
        """The record alone."""
        return self if self.image is None else ResultMessage(self.record)

    def text(self) -> str:
        """The record as one line of JSON; ValueError for a number that JSON cannot say."""
        return json.dumps(self.record, allow_nan=False, separators=(",", ":"))


BLOCKED, DISK_FULL, GONE, INVALID, REFUSED = "blocked", "disk_full", "gone", "invalid", "refused"
SERVER_ERROR, TIMEOUT, UNREACHABLE, UNWRITABLE, ERROR = "server_error", "timeout", "unreachable", "unwritable", "error"
"""The reasons for which results are not delivered, beside those of the outbox."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}


class DeliveryError(Exception):
    """A sink did not take a parcel, for one of the reasons above; the first `delivered` of those given were taken.

    `for_good`: this parcel is never taken, and not tried again. `answered`: the sink is there, and does not get along
    with this parcel. `stays_open`: the sink is not to be opened anew for that.
    """

    def __init__(
        self,
        reason: str,
        said: str,
        delivered: int = 0,
        for_good: bool = False,
        answered: bool = False,
        stays_open: bool = False,
    ) -> None:
        super().__init__(said)
        self.reason, self.delivered, self.for_good, self.answered = reason, delivered, for_good, answered
        self.stays_open = stays_open or for_good


class SinkClosed(Exception):
    """Whoever read this sink has gone, and nobody else will come."""


class Sink(ABC):
    """Takes results. All is called from one thread, which is that of this sink alone and may wait.

    What any of it raises is trouble: the sink is closed, and after a while opened and tried again (`NotTaken` says
    more; `Closed` ends it).
    """

    batch = 1
    """How many parcels it takes at once."""

    def open(self) -> None:  # noqa: B027 (not every kind has something to do)
        """Get ready: before the first parcel, after trouble, and when files are to be opened anew."""

    @abstractmethod
    def write(self, parcels: Sequence[ResultMessage]) -> None:
        """Deliver all of these, `batch` at most; on return they are."""

    def tend(self) -> None:  # noqa: B027
        """Called now and then while nothing is to be delivered; raises where the connection is lost."""

    def close(self) -> None:  # noqa: B027
        """Let go of files and connections."""


class SinkConfig(ABC):
    """One sink of a box config, its paths absolute; where it writes files, `paths` says which."""

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
        """Whether it carries pictures."""
        return False

    @property
    @abstractmethod
    def name(self) -> str:
        """Where results go, in words for the log; no secrets."""

    @abstractmethod
    def made(self) -> Sink:
        """The sink, not yet open."""

    def check(self) -> None:  # noqa: B027
        """Raise InputError, in one line, where it can never be opened."""

    @property
    def reach_s(self) -> float:
        """How long `reach` may take; after that it does not answer."""
        return 1.0

    def reach(self) -> str | None:
        """Why it does not take results at present, if so; nothing is sent that would be one."""
        return None


class SinkKeys(BaseModel):
    """The keys of one sink in a box config; each kind adds its own."""

    model_config = ConfigDict(extra="forbid")

    kind: str

    @abstractmethod
    def settled(self, root: Path) -> SinkConfig:
        """What they say as plain values, paths relative to `root`."""


def to_delivery_error(error: Exception) -> DeliveryError:
    """What any error of a sink means."""
    if isinstance(error, DeliveryError):
        return error
    cause = error if isinstance(error, OSError) else error.__cause__
    said = error.strerror if isinstance(error, OSError) and error.filename is None else None
    return DeliveryError(
        _reason(cause if isinstance(cause, OSError) else error), said or str(error) or type(error).__name__
    )


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return TIMEOUT
    if isinstance(error, OSError) and error.errno in _FULL:
        return DISK_FULL
    if isinstance(error, OSError) and error.errno in _UNWRITABLE:
        return UNWRITABLE
    return UNREACHABLE if isinstance(error, OSError | http.client.HTTPException) else ERROR


SINKS: dict[str, tuple[str, str]] = {
    "jsonl": ("edge_runtime.sinks.jsonl", "JsonLinesKeys"),
    "mqtt": ("edge_runtime.sinks.mqtt", "MqttKeys"),
    "webhook": ("edge_runtime.sinks.webhook", "WebhookKeys"),
}
"""Kind -> module, and the class of its keys."""


def parse_sinks(path: Path, given: Sequence[Mapping[str, Any]], root: Path) -> tuple[SinkConfig, ...]:
    """The sinks of the config at `path`, file names relative to `root`; InputError for an unknown kind or key."""
    return tuple(_keys_of(path, one, f"sinks[{index}]").settled(root) for index, one in enumerate(given))


def _keys_of(path: Path, given: Mapping[str, Any], key: str) -> SinkKeys:
    kind = given.get("kind")
    if kind is None:
        raise InputError(path, "this key is missing", f"use {', '.join(SINKS)}", f"{key}.kind")
    if not isinstance(kind, str) or kind not in SINKS:
        raise InputError(path, f"unknown kind '{str(kind)[:40]}'", f"use {', '.join(SINKS)}", f"{key}.kind")
    module, keys = SINKS[kind]
    return validate(path, given, getattr(importlib.import_module(module), keys), key)
