"""What every source of frames can do, and how it says that it is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

Shot = Callable[[], "np.ndarray | None"]
"""Makes the picture of a decoded frame, RGB uint8 (H, W, 3), in any thread, once; None if it does not decode."""


class SourceLost(Exception):
    """A source cannot be opened or gives no more frames; the text may be shown: no address, no password."""


class Source(Protocol):
    """Where a camera's frames come from; used by one thread. `fps` is the source's own rate, None if it has none.

    `damaged` counts what could not be decoded.
    """

    fps: float | None
    damaged: int

    def advance(self) -> bool:
        """Go to the next frame that decodes; False at the end of what has one. Raises SourceLost."""
        ...

    def shot(self) -> Shot:
        """The frame advanced to; turning it into a picture, which costs more, is left to who wants it."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


def picture_of(shot: Shot) -> np.ndarray | None:
    """The picture, RGB uint8 (H, W, 3); None where it does not decode."""
    try:
        return shot()
    except Exception:  # a decoder can fail in any way
        return None


def reason_of(error: BaseException) -> str:
    """Why something failed, fit to be shown: libraries write addresses with their passwords into their messages."""
    if isinstance(error, SourceLost):
        return str(error)
    said = getattr(error, "strerror", None)
    return said if isinstance(said, str) and said else type(error).__name__
