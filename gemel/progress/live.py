"""Progress on a terminal: stages, part done and time left, bytes saved, each query's ratio; it redraws itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TextIO

from gemel.progress.sentences import sentence
from gemel.progress.standing import Standing, marks
from gemel.progress.words import metric
from gemel.text import duration, number, percent, size

REFRESH_PER_S = 4
BAR_CELLS = 30


class Live:
    """A table that redraws itself from another thread."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self._clock, self._started = clock, clock()
        self._standing = Standing(self._started)
        self._last = ""
        self._saved = ""
        self._scores: dict[str, tuple[str, str]] = {}
        self.live = RichLive(get_renderable=self.draw, console=Console(file=out), refresh_per_second=REFRESH_PER_S)

    def __call__(self, event: str, **fields: Any) -> None:
        self._standing.hear(event, fields, self._clock())
        if event in ("stages", "stage", "part"):
            return
        if event == "warning":
            self.live.console.print(sentence(event, fields), style="yellow", highlight=False, markup=False)
            return
        self._last = sentence(event, fields)
        self._note_scores(event, fields)
        if "saved_bytes" in fields:
            of = f" of at most {size(fields['ceiling_bytes'])}" if "ceiling_bytes" in fields else ""
            self._saved = f"{size(fields['saved_bytes'])} saved{of}"

    def _note_scores(self, event: str, fields: dict[str, Any]) -> None:
        ratios = dict(fields.get("ratios") or {})
        if isinstance(fields.get("query"), str) and isinstance(fields.get("ratio"), (int, float)):
            ratios[fields["query"]] = fields["ratio"]
        met = fields.get("met")
        style = {True: "green", False: "red"}.get(met, "") if isinstance(met, bool) else ""
        self._scores |= {query: (f"{percent(ratio)} of the original", style) for query, ratio in ratios.items()}
        if event == "original" and {"query", "metric", "test"} <= fields.keys():
            self._scores[fields["query"]] = (f"{metric(fields['metric'])} {number(fields['test'])} on test", "")

    def draw(self) -> Any:
        """The table as it stands (rich's renderable)."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        now, standing = self._clock(), self._standing
        rows: list[Any] = [
            Text(f"{'  ' * depth}{mark} {name}", style="bold" if mark == "▸" else "dim")
            for depth, level in enumerate(standing.levels)
            for mark, name in marks(level)
        ]
        if standing.done is not None:
            filled = round(BAR_CELLS * standing.done)
            rows.append(Text(f"{'━' * filled}{'╌' * (BAR_CELLS - filled)} {standing.part(now)}"))
        grid = Table.grid(padding=(0, 2))
        grid.add_row("elapsed", duration(now - self._started))
        if self._last:
            grid.add_row("now", Text(self._last))
        if self._saved:
            grid.add_row("bytes", Text(self._saved))
        for query, (score, style) in self._scores.items():
            grid.add_row(Text(query), Text(score, style=style))
        return Group(*rows, grid)
