"""Values of an event as words: bytes, shares and times in their own units, counts with their noun.

Where some work stands: which stages there are, which is at work, how much of it is done.

Work that is part of other work announces stages of its own (`merger.events`): they lie within the stage that
was at work then, and end when the outer work begins its next one.

Each event of long work as a sentence in plain words; one that is not known here still reads.

Events of training and merging are described in `merger.events`, of how a merge goes in docs/merging.md.

Progress where nobody watches: a sentence for each event, and one more where nothing came for a while.

Progress on a terminal: stages, part done and time left, bytes saved, each query's ratio; it redraws itself.

What a long command shows while it works: a live table on a terminal, sentences elsewhere.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from gemel.text import duration, number, percent, size
from models.errors import one_line

if TYPE_CHECKING:
    from merger.events import Progress


NAMED = 3


def format_field(name: str, value: Any) -> str:
    """One field of an event that nothing is known about: its name and value."""
    said = name.replace("_", " ")
    if isinstance(value, Mapping):
        return f"{said} " + ", ".join(f"{key} {format_value(item)}" for key, item in value.items())
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if name.endswith("bytes"):
            return f"{name.removesuffix('bytes').rstrip('_').replace('_', ' ')} {size(value)}".strip()
        if name.endswith("fraction"):
            return f"{name.removesuffix('fraction').rstrip('_').replace('_', ' ')} {percent(value)}".strip()
        if name == "seconds":
            return duration(value)
    return f"{said} {format_value(value)}"


def format_value(value: Any) -> str:
    """A value as a person writes it."""
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) >= 0.01 or not value else f"{value:.2g}"
    if isinstance(value, (list, tuple, set, frozenset)):
        return ", ".join(format_value(item) for item in value)
    return str(value)


def join_names(names: Sequence[str]) -> str:
    """Names with commas, the first few of them."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def count_noun(count: int, one: str, many: str | None = None) -> str:
    """A count and its noun."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def worst_ratio(ratios: Mapping[str, float]) -> tuple[str, float]:
    """The query that keeps least, and what it keeps."""
    return min(ratios.items(), key=lambda item: item[1])


def metric_name(name: str) -> str:
    """A metric's name in words."""
    return {"f1": "F1"}.get(name, name.replace("_", " "))


@dataclass
class StageLevel:
    """The stages of one piece of work; `at` is the place of the one at work, None before the first.

    Stages that were not `said_before` are those that began so far.
    """

    names: list[str]
    at: int | None = None
    said_before: bool = True

    @property
    def stage(self) -> str | None:
        """The name of the stage at work."""
        return None if self.at is None else self.names[self.at]


class StageTracker:
    """What the events `stages`, `stage` and `part` came to; `hear` each with the time it came (seconds)."""

    def __init__(self, now: float) -> None:
        self.levels: list[StageLevel] = []
        self.began = now
        self.done: float | None = None
        self.ends: float | None = None

    def hear(self, event: str, fields: Mapping[str, Any], now: float) -> None:
        """Take note of an event; others than the three change nothing."""
        if event == "stages":
            self._announced([str(name) for name in fields["names"]])
        elif event == "stage":
            self._begun(str(fields["name"]))
            self.began, self.done, self.ends = now, None, None
        elif event == "part":
            left = fields.get("seconds_left")
            self.done, self.ends = fields["done"], None if left is None else now + left

    def _announced(self, names: list[str]) -> None:
        for place, level in enumerate(self.levels):
            if level.names == names or level.at is None:  # the same work once more, or what never began
                del self.levels[place:]
                break
        self.levels.append(StageLevel(names))

    def _begun(self, name: str) -> None:
        for place in reversed(range(len(self.levels))):
            level = self.levels[place]
            if name in level.names:
                del self.levels[place + 1 :]
                level.at = level.names.index(name)
                return
        if not self.levels or self.levels[-1].said_before:
            self.levels.append(StageLevel([], said_before=False))
        self.levels[-1].names.append(name)
        self.levels[-1].at = len(self.levels[-1].names) - 1

    def announced(self) -> str:
        """The stages announced last, as one sentence."""
        level, outer = self.levels[-1], self.levels[-2].stage if len(self.levels) > 1 else None
        count = len(level.names)
        what = f"{count} stages" if count != 1 else "one stage"
        return f"{outer or 'this'} takes {what}: {', '.join(level.names)}"

    def stage(self) -> str:
        """The stage at work as a sentence, within the outer ones."""
        parts = [
            f"{level.stage} ({level.at + 1} of {len(level.names)})" if level.said_before else f"{level.stage}"
            for level in self.levels
            if level.at is not None
        ]
        return ", ".join(parts)

    def still(self, now: float) -> str:
        """What is said when nothing else was for a while."""
        stage = next((level.stage for level in reversed(self.levels) if level.stage), None)
        if stage is None:
            return f"still at work, for {duration(now - self.began)} now"
        if self.done is None:
            return f"still at '{stage}', for {duration(now - self.began)} now"
        return f"still at '{stage}': {self.part(now)}"

    def part(self, now: float) -> str:
        """How much of the stage at work is done, and how long the rest takes; empty where nobody knows.

        Where that time is over and nothing more was told, how long it has taken.
        """
        if self.done is None:
            return ""
        done = f"{percent(self.done, 0)} done"
        if self.ends is None:
            return done
        if self.ends < now:
            return f"{done}, after {duration(now - self.began)}"
        return f"{done}, about {duration(max(1.0, self.ends - now))} left"


def stage_marks(level: StageLevel) -> Sequence[tuple[str, str]]:
    """(mark, name) of each stage of a level: done, at work, or to come."""
    at = -1 if level.at is None else level.at
    return [("✓" if i < at else "▸" if i == at else "·", name) for i, name in enumerate(level.names)]


Fields = Mapping[str, Any]


def format_event(event: str, fields: Fields) -> str:
    """What is told of an event, in one line, without a full stop."""
    return one_line(_sentence(event, fields))


def _sentence(event: str, fields: Fields) -> str:
    known = EVENT_FORMATS.get(event)
    if known is not None:
        try:
            return known(fields)
        except (KeyError, TypeError, ValueError, AttributeError):
            pass  # fields that a newer worker names otherwise
    words = ", ".join(format_field(name, value) for name, value in fields.items() if value is not None)
    return event.replace("_", " ") + (f" ({words})" if words else "")


def _warning(f: Fields) -> str:
    return f"take note: {f['text']}"


def _query(f: Fields) -> str:
    return f"training the original of {f['query']}, {f['index']} of {f['count']}"


def _cycle(f: Fields) -> str:
    return f"{f['query']}: training cycle {f['cycle']} of at most {f['cycles']} ends at {number(f['val'])} on val"


def _original(f: Fields) -> str:
    took = f", after {duration(f['seconds'])}" if "seconds" in f else ""
    test = f", {number(f['test'])} on test" if "test" in f else ""
    return f"the original of {f['query']} is trained: {metric_name(f['metric'])} {number(f['val'])} on val{test}{took}"


def _epoch(f: Fields) -> str:
    queries = f["queries"]
    who = "all together" if len(queries) > 1 else f"{queries[0]}"
    text = f"training {who}, epoch {f['epoch']} of {f['epochs']}"
    ratios = f.get("ratios")
    if not ratios:
        return f"{text}: loss {f['loss']:.3g}" if "loss" in f else text
    if len(ratios) == 1:
        return f"{text}: it keeps {number(next(iter(ratios.values())), 2)} of its original"
    query, ratio = worst_ratio(ratios)
    return f"{text}: worst query keeps {number(ratio, 2)} of its original ({query})"


def _reference(f: Fields) -> str:
    return (
        f"the original of {f['query']} reaches {metric_name(f['metric'])} {number(f['val'])} on val; "
        f"merged it must keep at least {number(f['needed'])}"
    )


def _precision(f: Fields) -> str:
    times = [
        f"{name} {1000 * f[name]:.0f} ms" for name in ("fp32", "tf32", "bf16") if isinstance(f.get(name), (int, float))
    ]
    return f"{f['model']} trains in {f['chosen']}" + (f" (a step takes {', '.join(times)})" if times else "")


def _layout(f: Fields) -> str:
    kinds = {
        kind: [query for query, own in f["precisions"].items() if own == kind] for kind in f["precisions"].values()
    }
    computed = "; ".join(f"{kind} for {join_names(queries)}" for kind, queries in kinds.items())
    why = f", since memory was not enough for {' or for '.join(f['full'])}" if f["full"] else ", all of which fits"
    return f"a step has {f['chosen']}{why}" + (f"; precision: {computed}" if computed else "")


def _workers(f: Fields) -> str:
    where = f" in the Ray cluster {f['on']}" if f.get("on") else " at once"
    threads = f", {f['threads']} threads each" if isinstance(f.get("threads"), int) else ""
    return f"{count_noun(f['workers'], 'worker')}{where}{threads}"


def _crew(f: Fields) -> str:
    parts = "; ".join(f"{', '.join(own) or 'none'} ({percent(load)})" for own, load in zip(f["queries"], f["loads"]))
    return (
        f"{len(f['queries'])} processes, queries by FLOPs and by what they share: {parts}; "
        f"gradients of up to {size(f['crossing_bytes'])} cross a step"
    )


def _sums(f: Fields) -> str:
    given = ", ".join(size(nbytes / max(1, f["steps"])) for nbytes in f["given_bytes"])
    return f"in {f['steps']} steps the processes handed over {given} of gradients a step to be summed"


def _ancestry(f: Fields) -> str:
    kinship = min(f["kinship"].values(), default=0.0)
    if f["common"]:
        return f"the originals are related: their weights are close (kinship {number(kinship, 2)} of 1)"
    return (
        f"the originals are not related: each learned by itself (kinship {number(kinship, 2)} of 1), so the same "
        "feature may sit in other channels"
    )


def _equal(f: Fields) -> str:
    as_is = f"; {join_names(f['settled'])} share nothing else and stay as they are" if f["settled"] else ""
    sets = count_noun(f["sets"], "set of layers is", "sets of layers are")
    return f"{sets} equal already: {size(f['saved_bytes'])} less without any training{as_is}"


def _aligned(f: Fields) -> str:
    return (
        f"{f['query']}: {f['moved']} of {f['channels']} channels change places, so that they match those of the others"
    )


def _start(f: Fields) -> str:
    name, _, solved = f["start"].partition(", ")
    what = {
        "mean": "the mean of all weights",
        "aligned mean": "the mean of all weights, channels matched first",
    }.get(name, f"the weights of {name}")
    again = ", then solved for layer by layer" if solved else ""
    return f"starting from {what}{again}: {percent(f['error'], 0)} of what the models knew is lost before training"


def _rate(f: Fields) -> str:
    tried = f"tried the learning rate {f['rate']:g} for {f['epochs']:g} epochs"
    if "features" in f:
        tried += f" ({_way(f)})"
    if "regained" in f:
        return f"{tried}: {percent(max(0.0, f['regained']), 0)} of what was lost is back"
    if f["ratio"] is None:
        return f"{tried}: the training diverged"
    return f"{tried}: the worst query keeps {number(f['ratio'], 2)} of its original"


def _recipe(f: Fields) -> str:
    return f"training at the learning rate {f['rate']:g}, {f['epochs']} epochs at a time, {_way(f)}"


def _way(f: Fields) -> str:
    return f"features weigh {f['features']:g}, private weights move at {f['private']:g} of the rate"


def _waits(f: Fields) -> str:
    why = f"it loses {percent(f['lost'], 0)} at the start" if "lost" in f else f"it keeps only {number(f['ratio'], 2)}"
    return f"{f['waits']} waits until the others are merged: {why} ({number(f['required'], 2)} is required)"


def _accepted(f: Fields) -> str:
    return f"the others are merged: {size(f['saved_bytes'])} saved; now those that waited join"


def _adopting(f: Fields) -> str:
    return "with all layers shared every query is lost: on with models that become parts of others"


def _takes(f: Fields) -> str:
    layers = f"{f['takes']} takes over {count_noun(f['layers'], 'layer', 'layers')} of {f['from']}"
    kept = "kept" if f["accepted"] else f"{number(f['required'])} is required"
    return f"{layers}: {number(f['ratio'])} of its original ({kept}); {size(f['accepted_bytes'])} saved this way"


def _alone(f: Fields) -> str:
    reached = "enough" if f["ratio"] >= f["required"] else f"{number(f['required'])} is required"
    return f"{f['query']}, its private parts trained by themselves: {number(f['ratio'])} of its original ({reached})"


def _repair(f: Fields) -> str:
    if f["repair"] == "leaves":
        return f"{f['query']} does not reach what is required and keeps its original, unshared"
    return (
        f"{f['query']} gets help ({f['repair']}): it keeps {number(f['ratio'])} of its original "
        f"({number(f['required'])} is required)"
    )


def _widths(f: Fields) -> str:
    held = f"; not yet enough for {join_names(f['in_the_way'])}" if f["in_the_way"] else ""
    query, ratio = worst_ratio(f["ratios"])
    stored = ", ".join(f"{size(nbytes)} {name}" for name, nbytes in f["stored_bytes"].items() if nbytes)
    return f"stored in fewer bits ({stored}): worst query keeps {number(ratio, 2)} of its original ({query}){held}"


def _prefix(f: Fields) -> str:
    return (
        f"{f['query']} shares its first {f['prefix']} of {f['layers']} layers and keeps {number(f['ratio'], 2)} of "
        "its original"
    )


def _attempt(f: Fields) -> str:
    if "prefix" in f:
        held = "enough" if f["held"] else "too little"
        return f"{f['query']} with {count_noun(f['prefix'], 'frozen layer')} keeps {number(f['ratio'], 2)}: {held}"
    kept, tried = len(f["kept"]), len(f["members"])
    outcome = "the training diverged" if f["diverged"] else f"{kept} of {tried} layers can share"
    return f"round {f['round']}, {_kind(f['group'])}: {outcome}"


def _round(f: Fields) -> str:
    members = f.get("members") or ()
    ratios = f.get("ratios")
    worse = f"; worst query keeps {number(worst_ratio(ratios)[1], 2)} of its original" if ratios else ""
    shares = f"{count_noun(len(members), 'layer')} share" if members else "nothing is shared"
    of = f" of at most {size(f['ceiling_bytes'])}" if "ceiling_bytes" in f else ""
    return (
        f"round {f['round']} of {f['rounds']}, {_kind(f['signature'])}: {shares}, {size(f['saved_bytes'])}{of} "
        f"saved so far{worse}"
    )


def _kind(signature: str) -> str:
    return " ".join(signature.split()[:2])


def _test(f: Fields) -> str:
    what = f" {metric_name(f['metric'])} {number(f['original'])} became {number(f['merged'])}," if "metric" in f else ""
    text = f"{f['query']} on test:{what} {percent(f['ratio'])} of its original"
    met = f["met"] if "met" in f else f["ratio"] is not None and f["ratio"] >= f["target"]
    if not f.get("worth", True):
        return f"{text}; no evidence, since the original is too weak"
    return f"{text}; target {'met' if met else 'missed'}"


def _evaluate(f: Fields) -> str:
    return f"judging {f['query']}, its original beside it, on test"


def _stream(f: Fields) -> str:
    return f"playing the stream to the {f['arm']} in {size(f['memory_bytes'])} of memory ({f['memory']})"


def _profile(f: Fields) -> str:
    return f"measuring what {f['query']} costs on this machine"


EVENT_FORMATS: dict[str, Callable[[Fields], str]] = {
    "warning": _warning, "query": _query, "cycle": _cycle, "original": _original, "epoch": _epoch,
    "reference": _reference, "precision": _precision, "layout": _layout, "workers": _workers,
    "crew": _crew, "sums": _sums,
    "ancestry": _ancestry, "equal": _equal, "aligned": _aligned, "start": _start, "rate": _rate,
    "recipe": _recipe, "adopting": _adopting, "takes": _takes, "waits": _waits,
    "accepted": _accepted, "alone": _alone, "repair": _repair,
    "widths": _widths, "prefix": _prefix,
    "attempt": _attempt, "round": _round, "test": _test,
    "evaluate": _evaluate, "stream": _stream, "profile": _profile,
}  # fmt: skip


QUIET_S = 2.0
"""Of events that come often, one in so many seconds is told."""
SILENT_S = 8.0
"""After so long without a word it is said what is still going on; with the second between two looks, under 10."""
FREQUENT = ("epoch",)


class ProgressLog:
    """One line per event; `beat` says what is going on where nothing was said for long. Safe from any thread."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._clock, self._lock = out, clock, threading.Lock()
        self._started = self._said = clock()
        self._last = dict.fromkeys(FREQUENT, self._started - QUIET_S)
        self._standing = StageTracker(self._started)

    def __call__(self, event: str, **fields: Any) -> None:
        with self._lock:
            now = self._clock()
            self._standing.hear(event, fields, now)
            if event == "part":
                self._beat(now)
                return
            if event in FREQUENT:
                if now - self._last[event] < QUIET_S:
                    return
                self._last[event] = now
            if event == "stages":
                self._say(self._standing.announced(), now)
            elif event == "stage":
                self._say(self._standing.stage(), now)
            else:
                self._say(format_event(event, fields), now)

    def beat(self) -> None:
        """Say what is going on, if nothing was said for long."""
        with self._lock:
            self._beat(self._clock())

    def _beat(self, now: float) -> None:
        if now - self._said >= SILENT_S:
            self._say(self._standing.still(now), now)

    def _say(self, text: str, now: float) -> None:
        self._said = now
        print(f"[{now - self._started:6.1f} s] {text}", file=self._out, flush=True)


REFRESH_PER_S = 4
BAR_CELLS = 30


class ProgressTable:
    """A table that redraws itself from another thread."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self._clock, self._started = clock, clock()
        self._standing = StageTracker(self._started)
        self._last = ""
        self._saved = ""
        self._scores: dict[str, tuple[str, str]] = {}
        self.live = RichLive(get_renderable=self.draw, console=Console(file=out), refresh_per_second=REFRESH_PER_S)

    def __call__(self, event: str, **fields: Any) -> None:
        self._standing.hear(event, fields, self._clock())
        if event in ("stages", "stage", "part"):
            return
        if event == "warning":
            self.live.console.print(format_event(event, fields), style="yellow", highlight=False, markup=False)
            return
        self._last = format_event(event, fields)
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
            self._scores[fields["query"]] = (f"{metric_name(fields['metric'])} {number(fields['test'])} on test", "")

    def draw(self) -> Any:
        """The table as it stands (rich's renderable)."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        now, standing = self._clock(), self._standing
        rows: list[Any] = [
            Text(f"{'  ' * depth}{mark} {name}", style="bold" if mark == "▸" else "dim")
            for depth, level in enumerate(standing.levels)
            for mark, name in stage_marks(level)
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


LOOK_EVERY_S = 1.0
"""How often it is looked whether nothing was said for long."""


@contextmanager
def show_progress(out: TextIO | None = None) -> Iterator[Progress]:
    """Progress on `out` (stderr when None): live on a terminal, sentences elsewhere, never silent for 10 s."""
    stream = out if out is not None else sys.stderr
    if stream.isatty():
        progress = ProgressTable(stream)
        with progress.live:
            yield progress
        return
    lines, over = ProgressLog(stream), threading.Event()

    def look() -> None:
        while not over.wait(LOOK_EVERY_S):
            lines.beat()

    looking = threading.Thread(target=look, name="progress", daemon=True)
    looking.start()
    try:
        yield lines
    finally:
        over.set()
        looking.join()
