"""What a long command shows while it works: a live table on a terminal, plain lines elsewhere.

The workers call `progress(event, **fields)` and know nothing of terminals. Fields with a meaning here:
`query`, `saved_bytes`, `saved_fraction`, `ratio`, `ratios` {query: ratio}, `targets` {query: target}; any
others are shown as they come.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from gemel.text import duration, percent, size

REFRESH_PER_S = 4
QUIET_S = 2.0


class Progress(Protocol):
    """A callback that is told what is going on."""

    def __call__(self, event: str, /, **fields: Any) -> None: ...


def silent(event: str, /, **fields: Any) -> None:
    """Progress nobody watches."""


def told(name: str, value: Any) -> str:
    """One field as text: bytes, shares and times in their own units."""
    if isinstance(value, Mapping):
        return f"{name} " + ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if name.endswith("bytes") and isinstance(value, (int, float)):
        return f"{name.removesuffix('bytes').rstrip('_') or 'size'} {size(value)}"
    if name.endswith("fraction") and isinstance(value, (int, float)):
        return f"{name.removesuffix('fraction').rstrip('_')} {percent(value)}"
    if name in ("seconds", "elapsed") and isinstance(value, (int, float)):
        return duration(value)
    return f"{name} {_plain(value)}"


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, (list, tuple, set, frozenset)):
        return ", ".join(_plain(item) for item in value)
    return str(value)


class Lines:
    """One line per event; the same event about the same query at most every two seconds."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._started = out, time.monotonic()
        self._last: dict[tuple[str, Any], float] = {}

    def __call__(self, event: str, /, **fields: Any) -> None:
        now, key = time.monotonic(), (event, fields.get("query"))
        if now - self._last.get(key, -QUIET_S) < QUIET_S:
            return
        self._last[key] = now
        parts = [told(name, value) for name, value in fields.items() if value is not None]
        print(
            f"[{now - self._started:6.1f} s] {event}" + (": " if parts else "") + "; ".join(parts),
            file=self._out,
            flush=True,
        )


class Live:
    """A table that redraws itself: the step, bytes saved so far, each query's ratio, elapsed time."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self._started = time.monotonic()
        self._event, self._fields = "starting", {}
        self._saved = ""
        self._ratios: dict[str, float] = {}
        self._targets: dict[str, float] = {}
        self.live = RichLive(
            get_renderable=self.draw, console=Console(file=out), refresh_per_second=REFRESH_PER_S
        )

    def __call__(self, event: str, /, **fields: Any) -> None:
        self._ratios.update(fields.pop("ratios", None) or {})
        self._targets.update(fields.pop("targets", None) or {})
        if isinstance(fields.get("query"), str) and isinstance(fields.get("ratio"), (int, float)):
            self._ratios[fields["query"]] = fields["ratio"]
        saved = [
            told(name, fields[name])
            for name in ("saved_bytes", "saved_fraction")
            if fields.get(name) is not None
        ]
        self._saved = ", ".join(saved) or self._saved
        self._event, self._fields = event, fields

    def draw(self) -> Any:
        """The table as it stands (rich's renderable)."""
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        grid.add_row("elapsed", duration(time.monotonic() - self._started))
        shown = [
            told(key, value)
            for key, value in self._fields.items()
            if value is not None and "saved" not in key
        ]
        grid.add_row("now", Text(f"{self._event}  " + "; ".join(shown)))
        if self._saved:
            grid.add_row("saved", Text(self._saved))
        for query, ratio in self._ratios.items():
            target = self._targets.get(query)
            met = target is not None and ratio >= target
            style = "green" if met else "yellow" if target is not None else ""
            against = "" if target is None else f" of the original (target {percent(target)})"
            grid.add_row(Text(query), Text(percent(ratio) + against, style=style))
        return grid


@contextmanager
def shown_on(out: TextIO | None = None) -> Iterator[Progress]:
    """Progress on `out` (stderr when None): live on a terminal, lines elsewhere."""
    out = out or sys.stderr
    if not out.isatty():
        yield Lines(out)
        return
    progress = Live(out)
    with progress.live:
        yield progress
