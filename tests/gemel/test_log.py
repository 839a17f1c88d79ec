"""Lines of the log of `gemel run`: date, zone and level, as text or as JSON."""

from __future__ import annotations

import datetime
import json
import logging
import sys

from gemel.process import JsonFormatter, TextFormatter


def record(text: str, error: bool = False) -> logging.LogRecord:
    details = None
    if error:
        try:
            raise ValueError("no")
        except ValueError:
            details = sys.exc_info()
    return logging.LogRecord("gemel.run", logging.WARNING, __file__, 1, "%s", (text,), details)


def test_text_line_has_date_zone_and_level() -> None:
    time, level, text = TextFormatter().format(record("camera gate\nis away")).split(" ", 2)
    assert datetime.datetime.fromisoformat(time).tzinfo is not None
    assert level == "WARNING" and text == "camera gate\\nis away"


def test_json_line_is_one_object() -> None:
    line = JsonFormatter().format(record('a "quoted"\nline', error=True))
    found = json.loads(line)
    assert "\n" not in line and found["level"] == "warning" and found["message"] == 'a "quoted"\nline'
    assert datetime.datetime.fromisoformat(found["time"]).tzinfo is not None and "ValueError" in found["traceback"]
