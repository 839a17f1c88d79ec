"""Long preparations say so while they last."""

from __future__ import annotations

import logging
import threading

from edge_runtime.engines.setup import log_progress
from models.process import quiet


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.told = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        assert record.getMessage() == "compiling: 0 s so far"
        self.told.set()


def test_what_takes_long_says_so_while_it_lasts_though_compilers_are_kept_quiet(caplog):
    caplog.set_level(logging.INFO, "gemel.run")
    log, heard = logging.getLogger("gemel.run"), Heard()
    log.addHandler(heard)
    try:
        with log_progress("compiling", every_s=0.001), quiet():
            assert heard.told.wait(60)
    finally:
        log.removeHandler(heard)
    heard.told.clear()
    with log_progress("compiling", every_s=60):
        pass
    assert not heard.told.is_set(), "what ends soon is not told"
