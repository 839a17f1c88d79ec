"""Progress of long commands on stderr: bars on a terminal, one line an event in a file.

The events are those of `merger.events`; each has a sentence here, and an unknown one is printed with its fields.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from gemel.models.errors import one_line
from gemel.text import duration, flops_text, key_text, number, percent, size

if TYPE_CHECKING:
    from gemel.models.stages import Progress

Fields = Mapping[str, Any]
INTERVAL_S = 60.0
"""A log shows a frequent event, and that a stage still runs, at most once in this time."""
FREQUENT_EVENTS = ("epoch", "part")
POLL_INTERVAL_S = 1.0


@dataclass
class StageLevel:
    """The stages of one piece of work; `count` is None where they become known one by one."""

    names: list[str]
    count: int | None
    current: int | None = None

    def describe(self) -> str:
        """The running stage, with its number where the count is known."""
        if self.current is None:
            return ""
        return self.names[self.current] + (f" ({self.current + 1} of {self.count})" if self.count else "")


class StageTracker:
    """Which stages are announced and running, and how much of the running one is done.

    Work within other work announces stages of its own: they are nested in the stage that runs, and end with it. No
    time left is shown that goes beyond `limit_s` after the start.
    """

    def __init__(self, now: float, limit_s: float | None = None) -> None:
        self.levels: list[StageLevel] = []
        self.began = now
        self.done: float | None = None
        self.ends_at: float | None = None
        self._limit = None if limit_s is None else now + limit_s

    def update(self, event: str, fields: Fields, now: float) -> None:
        """Apply one of the events `stages`, `stage` and `part`; others change nothing."""
        if event == "stages":
            self._announce(fields["names"])
        elif event == "stage":
            self._begin(fields["name"])
            self.began, self.done, self.ends_at = now, None, None
        elif event == "part":
            left = fields["seconds_left"]
            self.done, self.ends_at = fields["done"], None if left is None else now + left
            if self.ends_at is not None and self._limit is not None:
                self.ends_at = min(self.ends_at, max(now, self._limit))

    def _announce(self, names: list[str]) -> None:
        for index, level in enumerate(self.levels):
            if level.names == names or level.current is None:  # the same work again, or stages that never began
                del self.levels[index:]
                break
        self.levels.append(StageLevel(names, len(names)))

    def _begin(self, name: str) -> None:
        for index in reversed(range(len(self.levels))):
            if name in self.levels[index].names:
                del self.levels[index + 1 :]
                break
        else:
            if self.levels and self.levels[-1].count is None:
                self.levels.pop()
            self.levels.append(StageLevel([name], None))
        self.levels[-1].current = self.levels[-1].names.index(name)

    def describe_announced(self) -> str:
        """The stages that were announced last."""
        names = self.levels[-1].names
        return f"{'1 stage' if len(names) == 1 else f'{len(names)} stages'}: {'; '.join(names)}"

    def describe_stage(self) -> str:
        """The running stage, after the stages that it is part of."""
        return ", ".join(text for level in self.levels if (text := level.describe()))

    def describe_part(self, now: float) -> str:
        """How much of the running stage is done and how long the rest takes, or the most that it takes."""
        parts = [] if self.done is None else [f"{percent(self.done, 0)} done"]
        if self.ends_at is not None and self.ends_at > now:
            parts.append(f"{'about' if parts else 'at most'} {duration(self.ends_at - now)} left")
        return ", ".join(parts)


class ProgressDisplay:
    """Prints a line for each event, and shows the running stage: as a bar on a terminal, else once a minute.

    A log prints frequent events at most once a minute. Thread-safe.
    """

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic, limit_s: float | None = None) -> None:
        self._out, self._clock, self._lock = out, clock, threading.Lock()
        self._started = self._printed_at = clock()
        self._tracker = StageTracker(self._started, limit_s)
        self.bars = None
        if out.isatty() or is_notebook():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            console = Console(file=out) if out.isatty() else Console()  # which finds out that it is in a notebook
            self.bars = Progress(
                SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(),
                TextColumn("{task.fields[part]}", markup=False), TimeElapsedColumn(), console=console,
            )  # fmt: skip
            self.bars.add_task("starting", total=None, part="")

    def __call__(self, event: str, **fields: Any) -> None:
        with self._lock:
            now = self._clock()
            self._tracker.update(event, fields, now)
            if self.bars is not None:
                self._update_bar(event, fields, now)
            elif event == "stages":
                self._print(self._tracker.describe_announced(), now)
            elif event == "stage":
                self._print(self._tracker.describe_stage(), now)
            elif event not in FREQUENT_EVENTS:
                self._print(format_event(event, fields), now)
            else:
                self._print_running(format_event(event, fields) if event != "part" else "", now)

    def print_line(self, line: str) -> None:
        """Print a line that is no event."""
        with self._lock:
            if self.bars is not None:
                self.bars.console.print(line, highlight=False, markup=False)
            else:
                self._print(line, self._clock())

    def print_if_quiet(self) -> None:
        """Print the running stage if nothing was printed for a minute."""
        with self._lock:
            self._print_running("", self._clock())

    def _update_bar(self, event: str, fields: Fields, now: float) -> None:
        assert self.bars is not None
        task = self.bars.task_ids[0]
        self.bars.tasks[0].total = None if self._tracker.done is None else 1.0  # `update` takes None for unchanged
        if event == "stage":
            self.bars.reset(task, description=self._tracker.describe_stage(), part="")
        elif event == "part":
            self.bars.update(task, completed=self._tracker.done, part=self._tracker.describe_part(now))
        elif event == "epoch":
            self.bars.update(task, part=format_event(event, fields))
        elif event != "stages":
            self.bars.console.print(format_event(event, fields), highlight=False, markup=False)

    def _print_running(self, text: str, now: float) -> None:
        if now - self._printed_at >= INTERVAL_S:
            text = text or self._tracker.describe_stage() or "running"
            parts = [f"{duration(now - self._tracker.began)} so far", self._tracker.describe_part(now)]
            self._print(f"{text}; {', '.join(filter(None, parts))}", now)

    def _print(self, text: str, now: float) -> None:
        self._printed_at = now
        print(f"[{now - self._started:6.1f} s] {text}", file=self._out, flush=True)


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which shows bars though its stderr is no terminal."""
    return "ipykernel" in sys.modules


_shown: list[ProgressDisplay] = []
"""The displays that are open, the last one in use."""


def print_note(note: str, print_alone: Callable[[str], object]) -> None:
    """Print a note among the lines of the progress that is shown, with its time; without one by `print_alone`."""
    (_shown[-1].print_line if _shown else print_alone)(one_line(f"note: {note}"))


@contextmanager
def show_progress(out: TextIO | None = None, limit_s: float | None = None) -> Iterator[Progress]:
    """Progress on `out` (default stderr): bars on a terminal, lines elsewhere. `limit_s` bounds the time left."""
    display = ProgressDisplay(out if out is not None else sys.stderr, limit_s=limit_s)
    _shown.append(display)
    try:
        with display.bars if display.bars is not None else _watch(display):
            yield display
    finally:
        _shown.remove(display)


@contextmanager
def _watch(display: ProgressDisplay) -> Iterator[None]:
    """Print that a stage still runs, from a thread that ends with this block."""
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(POLL_INTERVAL_S):
            display.print_if_quiet()

    watcher = threading.Thread(target=watch, name="progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()


def format_event(event: str, fields: Fields) -> str:
    """One line about an event, without a full stop."""
    known = EVENT_FORMATS.get(event)
    if known is not None:
        try:
            return one_line(known(fields))
        except (KeyError, TypeError, ValueError, AttributeError):
            pass  # a worker of another version may send other fields
    values = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in fields.items() if value is not None)
    return one_line(event.replace("_", " ") + (f" ({values})" if values else ""))


def _acceptance(f: Fields) -> str:
    parts = [f"{what}: {', '.join(f[what])}" for what in ("accepted", "unproven", "refused") if f.get(what)]
    return f"proofs: {'; '.join(parts) or 'none needed: nothing is shared'}"


def _lowest(ratios: Mapping[str, float]) -> str:
    query, ratio = min(ratios.items(), key=lambda item: item[1])
    return f"lowest ratio {number(ratio, 2)} ({query})"


def _original(f: Fields) -> str:
    test = f", {number(f['test'])} on test" if "test" in f else ""
    took = f", in {duration(f['seconds'])}" if "seconds" in f else ""
    return f"{f['query']}: original trained, {key_text(f['metric'])} {number(f['val'])} on val{test}{took}"


def _epoch(f: Fields) -> str:
    text = f"epoch {f['epoch']} of {f['epochs']} ({'joint' if len(f['queries']) > 1 else f['queries'][0]})"
    if f.get("ratios"):
        return f"{text}: {_lowest(f['ratios'])}"
    return f"{text}: loss {f['loss']:.3g}" if "loss" in f else text


def _step(f: Fields) -> str:
    outcome = "taken" if f["taken"] else f"not taken: {number(f['required'])} is required"
    saved, ratio = size(f["saved_bytes"]), number(f["ratio"])
    price = [] if f.get("kept_bytes") is None else [f"keeps {size(f['kept_bytes'])}"]
    price += [] if f.get("flops_per_s") is None else [flops_text(f["flops_per_s"])]
    price += [] if f.get("agreement") is None else [f"answers as before {percent(f['agreement'])}"]
    price += ["in integers"] if f.get("in_integers") else []
    line = f"{f['query']:<20} {f['step']:<42} {saved:>10}  {ratio}  {outcome}"
    return f"{line}; {', '.join(price)}" if price else line


def _camera_prefix(f: Fields) -> str:
    saves = f", ratio {number(f['ratio'])}, saves {flops_text(f['saved_flops_per_s'])}" if f["common"] else ""
    donor = f["donor"] or "the network that it was trained from"
    return f"{f['query']}: first {f['common']} of {f['of']} layers in common with {donor}{saves}"


def _attempt(f: Fields) -> str:
    if "prefix" in f:
        outcome = "enough" if f["held"] else "not enough"
        return f"{f['query']}: {f['prefix']} frozen layers, ratio {number(f['ratio'], 2)} ({outcome})"
    outcome = "diverged" if f["diverged"] else f"{len(f['kept'])} of {len(f['members'])} layers share"
    return f"round {f['round']}, {' '.join(f['group'].split()[:2])}: {outcome}"


def _round(f: Fields) -> str:
    bound = f" of at most {size(f['ceiling_bytes'])}" if "ceiling_bytes" in f else ""
    group = " ".join(f["signature"].split()[:2])
    return f"round {f['round']} of {f['rounds']}, {group}: {size(f['saved_bytes'])}{bound} saved"


def _test(f: Fields) -> str:
    values = f"{key_text(f['metric'])} {number(f['original'])} -> {number(f['merged'])}, " if "metric" in f else ""
    text = f"{f['query']} on test: {values}ratio {number(f['ratio'])}"
    if f["reason"]:
        return f"{text} (no evidence: {f['reason']})"
    if not f["worth"]:
        return f"{text} (no evidence: the original is too weak)"
    return f"{text} (target {'met' if f['met'] else 'missed'})"


EVENT_FORMATS: dict[str, Callable[[Fields], str]] = {
    "query": lambda f: f"{f['query']}: training the original ({f['index']} of {f['count']})",
    "cycle": lambda f: f"{f['query']}: cycle {f['cycle']} of at most {f['cycles']}, {number(f['val'])} on val",
    "original": _original,
    "epoch": _epoch,
    "reference": lambda f: (
        f"{f['query']}: original {key_text(f['metric'])} {number(f['val'])} on val, {number(f['needed'])} is required"
    ),
    "forecast": lambda f: f"{'about' if f['first'] else 'now about'} {f['text']}",
    "processes": lambda f: f"{len(f['queries'])} processes: {'; '.join(', '.join(q) or 'none' for q in f['queries'])}",
    "identical": lambda f: f"{f['sets']} sets of layers are identical: {size(f['saved_bytes'])} saved without training",
    "camera-prefix": _camera_prefix,
    "step": _step,
    "left-out": lambda f: (
        f"{f['step']}: left out, could save {size(f['possible_bytes'])} more, costs {size(f['price_bytes'])}"
    ),
    "accepted": _acceptance,
    "recipe": lambda f: f"training: learning rate {f['rate']:g}, {f['epochs']} epochs",
    "attempt": _attempt,
    "round": _round,
    "test": _test,
    "evaluate": lambda f: f"{f['query']}: evaluating merged model and original on test",
    "stream": lambda f: f"simulating the stream: {f['arm']}, {size(f['memory_bytes'])} ({f['memory']})",
    "profile": lambda f: f"{f['query']}: measuring",
}
