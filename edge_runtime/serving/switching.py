"""Going over to faster engines while a box serves: found in the background, taken up between two frames."""

from __future__ import annotations

import logging
import threading
import time

from edge_runtime.box import ReadyBox, format_engines
from edge_runtime.engines.background import Background
from edge_runtime.engines.choosing import Choice
from edge_runtime.engines.registry import FALLBACK
from edge_runtime.engines.timing import candidates
from edge_runtime.engines.unshared import bound_as
from edge_runtime.executor import Executor

TIMEOUT_S = 1.0

log = logging.getLogger("gemel.run")


class Switching:
    """Finds the fastest engines for a box that serves on torch, and hands them over once they are ready.

    Does nothing for a box that has no wish. `box` is the one that serves at present.
    """

    def __init__(self, box: ReadyBox) -> None:
        self.box = box
        self.bytes_moved = self.swaps = 0
        self._stopping = False
        self._background: Background | None = None
        self._thread: threading.Thread | None = None
        self._found: tuple[ReadyBox, Choice] | None = None

    def after(self, before: Switching) -> Switching:
        """Itself, where another box was served before: what was counted goes on."""
        self.bytes_moved, self.swaps = before.bytes_moved, before.swaps
        return self

    def start(self) -> None:
        """Begin to measure."""
        wish = self.box.wish
        if wish is None:
            return
        others = [name for name in candidates(wish.device, wish.stays) if name != FALLBACK]
        log.info("serving on %s; measuring %s in the background", FALLBACK, " and ".join(others))
        try:
            self._background = Background(self.box.fitted.box.bundle, wish)
        except OSError as error:
            log.warning("no process can be begun for that (%s): serving stays on %s", error, FALLBACK)
            return
        self._thread = threading.Thread(target=self._find, args=(self._background,), name="measuring", daemon=True)
        self._thread.start()

    def take_up(self, executor: Executor) -> None:
        """Let the executor go on with faster engines if any were found since; call it between two frames.

        What was loaded for it is counted apart, in `bytes_moved` and `swaps`. Should one of them fail, all queries go
        back to the engines that they had.
        """
        if self._found is None:
            return
        (box, choice), self._found = self._found, None
        started, arena, out = time.monotonic(), executor.device.arena, set(executor.publisher.out)
        before, swaps = arena.bytes_moved, arena.swaps
        _go_over(executor, box)
        if executor.publisher.out == out:
            moved = {query: name for query, name in box.names().items() if name != self.box.names()[query]}
            log.info(
                "switched %s: %.1fx faster; frames waited %.1f s meanwhile",
                format_engines(moved, "to"),
                choice.gain,
                time.monotonic() - started,
            )
            self.box = box
        else:
            failed = executor.publisher.out - out
            log.warning("a faster engine failed at %s: back on %s", ", ".join(sorted(failed)), FALLBACK)
            executor.publisher.readmit(failed)
            _go_over(executor, self.box)
        self.bytes_moved += arena.bytes_moved - before
        self.swaps += arena.swaps - swaps

    def stop(self) -> None:
        """End what is under way."""
        if self._background is None or self._thread is None or not self._thread.is_alive():
            return
        log.info("engines were not measured to the end; `gemel profile BUNDLE` measures them at leisure")
        self._stopping = True
        self._background.stop()
        self._thread.join(TIMEOUT_S)

    def _find(self, background: Background) -> None:
        why = background.wait()
        if self._stopping:
            return
        if why is not None:
            log.warning("engines could not be measured (%s): serving stays on %s", why, FALLBACK)
            return
        try:
            self._found = self.box.faster()
        except Exception as error:  # an engine can fail in any way; the box serves all the same
            log.warning("faster engines cannot be taken up (%s): serving stays on %s", error, FALLBACK)
            return
        if self._found is None:
            log.info("no engine is worth leaving %s for", FALLBACK)


def _go_over(executor: Executor, box: ReadyBox) -> None:
    executor.change(bound_as(box.engines, box.costs), box.costs, box.layouts, box.fitted.box.frames)
