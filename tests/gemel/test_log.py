"""Lines of the log of `gemel run`: date, zone and level, as text or as JSON."""

from __future__ import annotations

import datetime
import json
import logging
import sys

import pytest

from gemel.process import JsonFormatter, TextFormatter, configure_log, find_subjects


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


@pytest.mark.parametrize(
    ("template", "values", "subjects"),
    [
        ("camera %s is away: %s; %s", ("gate", "no", "retrying"), {"camera": "gate"}),
        ("%d of 100%% lost; query %s on camera %s", (3, "cars", "gate"), {"query": "cars", "camera": "gate"}),
        ("sink %s failed: %s", ("mqtt a:1", "no"), {"sink": "mqtt a:1"}),
        ("cameras %s and a query %d", ("gate", 3), {}),
        ("camera gate streams", (), {}),
        ("camera %s", (), {}),
    ],
)
def test_json_line_names_camera_query_and_sink(template, values, subjects) -> None:
    line = logging.LogRecord("gemel.run", logging.INFO, __file__, 1, template, values, None)
    assert find_subjects(line) == subjects


def test_log_has_no_information_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    monkeypatch.setattr(logging.getLogger("gemel"), "level", logging.NOTSET)
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    configure_log(handler, logging.INFO)
    for name in ("onnxscript.optimizer", "gemel.run"):
        logging.getLogger(name).info("a step of %s", name)
        logging.getLogger(name).warning("wrong in %s", name)
    assert seen == ["wrong in onnxscript.optimizer", "a step of gemel.run", "wrong in gemel.run"]
