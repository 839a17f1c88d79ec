"""Ctrl-C, SIGTERM and a terminal that closes end a command once, cleanly; a second one does not wait for what hangs."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from gemel.commands.outcome import DONE, INTERRUPTED

LEAVE_S = 0.5
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Makes these signals KeyboardInterrupt in the main thread, and remembers that one came: libraries make something
    else of it. Those that whoever started the process had ignored stay so, as under nohup.
    """

    def __init__(self) -> None:
        self.came = False
        self._before: dict[int, Any] = {}

    def begin(self) -> None:
        """Listen; only possible in the main thread."""
        _listen(self._before, lambda _: self._interrupt)

    def bound(self, code: int) -> None:
        """End the process within LEAVE_S, whatever hangs until then."""
        last = threading.Timer(LEAVE_S, os._exit, (code,))
        last.daemon = True
        last.start()

    def leave(self, code: int = INTERRUPTED) -> NoReturn:
        """End the process, all having been told; whatever hangs at that, a further interrupt ends it at once.

        Python's own end would wait for threads, and takes no notice of these signals while it ends.
        """
        self._all(lambda *_: os._exit(code))
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or nobody reads it any more
            sys.stdout.flush()
        os._exit(code)

    def hold(self) -> None:
        """Let none come between while the first is dealt with."""
        self._all(signal.SIG_IGN)

    def end(self) -> None:
        """Leave everything as it was before."""
        for number, before in self._before.items():
            signal.signal(number, before)

    def _all(self, handler: Any) -> None:
        for number in self._before:
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt


class Early:
    """Until `end`, a signal to stop ends the process at once and well, as there is nothing to finish yet, and SIGHUP
    asks for nothing.

    Not by an exception: that would come out of libraries as they are loaded, and some end the process then, in words of
    their own.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}

    def begin(self, last: Callable[[str], tuple[str, str]]) -> None:
        """Listen; `last` says what then goes to stdout and to stderr, from the name of the signal."""

        def leave(number: int, _: FrameType | None) -> None:
            for descriptor, text in enumerate(last(signal.Signals(number).name), 1):
                with contextlib.suppress(OSError):  # not through Python's buffers, at which it may be
                    os.write(descriptor, text.encode())
            os._exit(DONE)

        _listen(self._before, lambda number: leave if number != signal.SIGHUP else lambda *_: None)

    def end(self) -> None:
        """Leave everything as it was before."""
        while self._before:
            signal.signal(*self._before.popitem())


def _listen(before: dict[int, Any], by: Callable[[signal.Signals], Any]) -> None:
    """Have each of the signals handled so, but those that are ignored, and note what handled them `before`.

    Nothing is done in another thread than the main one, where that is not possible.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in SIGNALS:
        handler = signal.getsignal(number)
        if handler not in (signal.SIG_IGN, None):
            before[number] = handler
            signal.signal(number, by(number))
