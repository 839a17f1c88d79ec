"""What a long command shows while it works: a live table on a terminal, plain lines elsewhere.

The workers call `progress(event, **fields)` and know nothing of terminals. Fields with a meaning here:
`query`, `ratio`, `met`, `ratios` {query: ratio}, `saved_bytes`, `ceiling_bytes`; any others are shown as they
come. Events with one: `round`, `epoch` and `candidates` (frequent), `original` and `warning`
(`merger.journal.progress`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from gemel.text import duration, number, percent, size

if TYPE_CHECKING:
    from merger.journal.progress import Progress

REFRESH_PER_S = 4
QUIET_S = 2.0
FREQUENT = ("epoch", "candidates")
COUNTED = ("members", "kept")
SIGNATURES = ("group", "signature")
HIDDEN = ("work", "diverged")


def told(name: str, value: Any) -> str:
    """One field as text: bytes, shares and times in their own units."""
    if name in COUNTED and isinstance(value, (list, tuple)):
        return f"{name} {len(value)}"
    if name in SIGNATURES and isinstance(value, str):
        return " ".join(value.split()[:2])
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
        return f"{value:.3f}" if abs(value) >= 0.01 or not value else f"{value:.2g}"
    if isinstance(value, (list, tuple, set, frozenset)):
        return ", ".join(_plain(item) for item in value)
    return str(value)


class Lines:
    """One line per event; of those that come often one every two seconds."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._started = out, time.monotonic()
        self._last = dict.fromkeys(FREQUENT, -QUIET_S)

    def __call__(self, event: str, **fields: Any) -> None:
        now = time.monotonic()
        if event in FREQUENT:
            if now - self._last[event] < QUIET_S:
                return
            self._last[event] = now
        print(f"[{now - self._started:6.1f} s] {event}: {_line(fields)}", file=self._out, flush=True)


class Live:
    """A table that redraws itself: the step, bytes saved so far, each query's ratio, elapsed time."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self._started = time.monotonic()
        self._event = "starting"
        self._fields: dict[str, Any] = {}
        self._round: dict[str, Any] = {}
        self._saved = ""
        self._scores: dict[str, tuple[str, str]] = {}
        self.live = RichLive(get_renderable=self.draw, console=Console(file=out), refresh_per_second=REFRESH_PER_S)

    def __call__(self, event: str, **fields: Any) -> None:
        if event == "warning":
            self.live.console.print(f"warning: {fields.get('text')}", style="yellow", highlight=False)
            return
        ratios = dict(fields.pop("ratios", None) or {})
        if isinstance(fields.get("query"), str) and isinstance(fields.get("ratio"), (int, float)):
            ratios[fields["query"]] = fields["ratio"]
        met = fields.get("met")
        style = {True: "green", False: "red"}.get(met, "") if isinstance(met, bool) else ""
        self._scores |= {query: (f"{percent(ratio)} of the original", style) for query, ratio in ratios.items()}
        if event == "original":
            self._scores[fields["query"]] = (f"{fields['metric']} {number(fields['test'])} on test", "")
        saved = [told(name, fields.pop(name)) for name in ("saved_bytes", "ceiling_bytes") if name in fields]
        self._saved = ", ".join(saved) or self._saved
        if event == "round":
            self._round = fields
        self._event, self._fields = event, fields

    def draw(self) -> Any:
        """The table as it stands (rich's renderable)."""
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        grid.add_row("elapsed", duration(time.monotonic() - self._started))
        if self._round:
            grid.add_row("round", Text(_line(self._round), overflow="ellipsis", no_wrap=True))
        if self._fields is not self._round:
            grid.add_row(Text(self._event), Text(_line(self._fields), overflow="ellipsis", no_wrap=True))
        if self._saved:
            grid.add_row("bytes", Text(self._saved))
        for query, (score, style) in self._scores.items():
            grid.add_row(Text(query), Text(score, style=style))
        return grid


def _line(fields: dict[str, Any]) -> str:
    shown = {name: value for name, value in fields.items() if value is not None and name not in HIDDEN}
    return "; ".join(told(name, value) for name, value in shown.items())


@contextmanager
def shown_on(out: TextIO | None = None) -> Iterator[Progress]:
    """Progress on `out` (stderr when None): live on a terminal, lines elsewhere."""
    stream = out if out is not None else sys.stderr
    if not stream.isatty():
        yield Lines(stream)
        return
    progress = Live(stream)
    with progress.live:
        yield progress
