"""Silence for libraries that talk to their own developers."""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep from the user what an exporter or compiler logs, warns of and prints: on failure, whole graphs."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextlib.contextmanager
def without_native_output() -> Iterator[None]:
    """Drop what native code prints on the process's standard output, which Python's own redirection does not reach."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
    try:
        kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    except OSError:  # there is none
        yield
        return
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what C's buffers still hold
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
