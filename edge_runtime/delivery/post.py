"""The post: every result to every sink."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from edge_runtime.delivery.base import SinkConfig
from edge_runtime.delivery.courier import Courier
from edge_runtime.delivery.parcel import Parcel


class Post:
    """Hands results to all sinks; never waits for any of them."""

    def __init__(self, sinks: Sequence[SinkConfig], courier: Callable[[SinkConfig], Courier] = Courier) -> None:
        self._couriers = [courier(config) for config in sinks]

    def start(self) -> None:
        """Begin to deliver."""
        for courier in self._couriers:
            courier.start()

    def offer(self, parcel: Parcel) -> None:
        """A result for every sink."""
        for courier in self._couriers:
            courier.offer(parcel)

    @property
    def is_unheard(self) -> bool:
        """Whether whoever read the results has gone, and nobody else is left."""
        return bool(self._couriers) and all(courier.is_gone for courier in self._couriers)

    @property
    def complaints(self) -> list[str]:
        """What sinks did not take, a line for each of them."""
        return [said for courier in self._couriers if (said := courier.complaint) is not None]

    def reopen(self) -> None:
        """Files and connections are opened anew, soon; may be called anywhere but in a signal handler."""
        for courier in self._couriers:
            courier.reopen()

    def close(self, timeout_s: float) -> list[str]:
        """Deliver what waits within so many seconds, and give up the rest; the names of the sinks that hang."""
        ends = time.monotonic() + timeout_s
        for courier in self._couriers:
            courier.close()
        return [courier.config.name for courier in self._couriers if not courier.join(ends - time.monotonic())]

    def to_json(self) -> list[dict[str, Any]]:
        """One record per sink (`Courier.to_json`)."""
        return [courier.to_json() for courier in self._couriers]
