"""The ledger: what became of every frame, per query, adding up at every moment."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

REPLACED = "replaced"
DEADLINE = "deadline"
MEMORY = "memory"
PAUSED = "paused"
RELOADED = "reload"


@dataclass(slots=True)
class Account:
    """One query's frames. `pending` is counted on its own, so that the sum can be checked and not only derived."""

    received: int = 0
    processed: int = 0
    late: int = 0
    failed: int = 0
    pending: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def balanced(self) -> bool:
        """Whether received = processed + dropped + failed + pending, none of them negative."""
        settled = self.processed + self.dropped.total() + self.failed
        return self.pending >= 0 and self.received == settled + self.pending

    def to_json(self) -> dict[str, Any]:
        return {
            "received": self.received,
            "processed": self.processed,
            "late": self.late,
            "failed": self.failed,
            "pending": self.pending,
            "dropped": dict(sorted(self.dropped.items())),
        }


class Ledger:
    """Counts frames of all queries; safe to use from several threads.

    Every frame is received once and settled at most once: processed, dropped for a reason, or failed. Settling a
    frame that is not pending raises RuntimeError, since a count that no longer adds up must not go unnoticed.
    """

    def __init__(self, queries: Iterable[str]) -> None:
        self._accounts = {query: Account() for query in queries}
        self._lock = threading.Lock()

    def add(self, queries: Iterable[str]) -> None:
        """These have accounts from now on; one that had gone goes on with its own."""
        with self._lock:
            self._accounts.update({query: Account() for query in queries if query not in self._accounts})

    def received(self, query: str) -> None:
        with self._lock:
            account = self._accounts[query]
            account.received += 1
            account.pending += 1

    def processed(self, query: str, late: bool = False) -> None:
        with self._lock:
            account = self._settle(query)
            account.processed += 1
            account.late += late

    def dropped(self, query: str, reason: str) -> None:
        with self._lock:
            self._settle(query).dropped[reason] += 1

    def failed(self, query: str) -> None:
        with self._lock:
            self._settle(query).failed += 1

    def _settle(self, query: str) -> Account:
        account = self._accounts[query]
        if account.pending < 1:
            raise RuntimeError(f"query {query}: a frame was settled that was not pending")
        account.pending -= 1
        return account

    @property
    def balanced(self) -> bool:
        """Whether every query's account adds up."""
        with self._lock:
            return all(account.balanced for account in self._accounts.values())

    def pending(self, query: str) -> int:
        """Frames of a query that are received and not settled."""
        with self._lock:
            return self._accounts[query].pending

    def to_json(self) -> list[dict[str, Any]]:
        """One record per query: `query`, received, processed (of which late), failed, pending, dropped by reason."""
        with self._lock:
            return [{"query": query, **account.to_json()} for query, account in self._accounts.items()]
