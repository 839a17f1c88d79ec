"""The post: every result to every sink."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_runtime.delivery.base import SinkConfig
from edge_runtime.delivery.courier import Courier
from edge_runtime.delivery.parcel import Parcel


@dataclass(frozen=True, eq=False)
class Rounds:
    """The couriers of another config: those `kept` among them go on as they are, those `gone` are to end."""

    couriers: tuple[Courier, ...]
    fresh: tuple[Courier, ...]
    gone: tuple[Courier, ...]


class Post:
    """Hands results to all sinks; never waits for any of them."""

    def __init__(self, sinks: Sequence[SinkConfig], courier: Callable[[SinkConfig], Courier] = Courier) -> None:
        self._couriers, self._courier = tuple(courier(config) for config in sinks), courier
        self._past: dict[str, dict[str, Any]] = {}

    def start(self) -> None:
        """Begin to deliver."""
        for courier in self._couriers:
            courier.start()

    def offer(self, parcel: Parcel) -> None:
        """A result for every sink."""
        for courier in self._couriers:
            courier.offer(parcel)

    def prepare(self, sinks: Sequence[SinkConfig]) -> Rounds:
        """Couriers for other sinks; a sink that stays as it is keeps its own, with all that waits."""
        left = list(self._couriers)
        couriers, fresh = [], []
        for config in sinks:
            kept = next((courier for courier in left if courier.config == config), None)
            if kept is None:
                fresh.append(kept := self._courier(config))
            else:
                left.remove(kept)
            couriers.append(kept)
        return Rounds(tuple(couriers), tuple(fresh), tuple(left))

    def take(self, rounds: Rounds) -> None:
        """Results go to these from now on; what is offered to fresh ones waits until `settle`."""
        self._couriers = rounds.couriers

    def settle(self, rounds: Rounds, timeout_s: float) -> list[str]:
        """Let those that are gone deliver what they can in so many seconds, then let the fresh ones begin.

        One after the other, since both may write to one file. Returns the names of the sinks that hang.
        """
        ends = time.monotonic() + timeout_s
        for courier in rounds.gone:
            courier.close()
        hanging = [courier.config.name for courier in rounds.gone if not courier.join(ends - time.monotonic())]
        for courier in rounds.gone:
            self._remember(courier.config.name, courier.to_json())
        for courier in rounds.fresh:
            courier.start()
        return hanging

    def past_json(self) -> list[dict[str, Any]]:
        """What became of the results of sinks that are gone: `name`, `delivered`, `undelivered`."""
        return [{"name": name, **counts} for name, counts in self._past.items()]

    def _remember(self, name: str, row: Mapping[str, Any]) -> None:
        before = self._past.get(name, {"delivered": 0, "undelivered": {}})
        lost = Counter(before["undelivered"]) + Counter(row["undelivered"])
        self._past[name] = {
            "delivered": before["delivered"] + row["delivered"],
            "undelivered": dict(sorted(lost.items())),
        }

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
