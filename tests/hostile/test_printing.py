"""Names that mean harm: what came from a file forges no line, hides none and turns none about."""

from __future__ import annotations

import io
import json
import logging
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from gemel import cli
from gemel.commands import CommandResult, Invocation
from gemel.merge_outcomes import MergeOutcomes
from gemel.process import OneLineFormatter
from gemel.progress import ProgressLog, format_event
from gemel.text import table
from models.errors import InputError, one_line
from tests.hostile.harness import refused, tried

HARM = {
    "newline": ("x\n/path: sound", "x\\n/path: sound"),
    "return": ("x\r/path: sound", "x\\r/path: sound"),
    "separator": ("x\u2028y", "x\\u2028y"),
    "next line": ("x\x85y", "x\\x85y"),
    "terminal": ("x\x1b[2Jy", "x\\x1b[2Jy"),
    "backspace": ("x\by", "x\\x08y"),
    "bidi": ("x\u202ey", "x\\u202ey"),
    "isolate": ("x\u2066y", "x\\u2066y"),
    "surrogate": ("x\udc80y", "x\\udc80y"),
    "tag": ("x\U000e0041y", "x\\U000e0041y"),
}
each = pytest.mark.parametrize(("given", "shown"), HARM.values(), ids=HARM)


def _bundle(path: Path, header: Mapping[str, object]) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


@each
def test_a_key_of_a_bundle_forges_no_line(tmp_path: Path, given: str, shown: str) -> None:
    path = tmp_path / "b.safetensors"
    for header in (
        {given: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        {"__metadata__": {given: "x"}},
        {"__metadata__": {"format": given, "gemel": json.dumps({given: 1})}},
        {"x": {"dtype": given, "shape": [0], "data_offsets": [0, 0]}},
    ):
        _bundle(path, header)
        seen = tried(["bundle", "verify", path], tmp_path).held()
        assert seen.code == 1 and seen.err == "" and seen.out.count("\n") == 1
        assert seen.out.startswith(f"{path}: ") and seen.out[:-1].isprintable()
        refused(["bundle", "show", path], tmp_path)


@each
def test_a_key_of_a_workload_forges_no_line(tmp_path: Path, given: str, shown: str) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(json.dumps({"name": "one", "cameras": {}, "queries": [], given: 1}))
    said = refused(["inspect", path], tmp_path, path)
    assert shown in said or "half a character" in said


@each
def test_errors_tables_and_sentences_are_lines(given: str, shown: str) -> None:
    assert one_line(given) == shown
    assert str(InputError(given, given, given, given)) == f"{shown}: {shown}: {shown}; {shown}"
    assert table(("a",), [(given,)]).split("\n")[-1] == shown
    assert shown in format_event("warning", {"text": given}) and shown in format_event("unknown", {"what": given})
    record = logging.LogRecord("gemel.run", logging.INFO, "", 0, "camera %s", (given,), None)
    assert OneLineFormatter("%(message)s").format(record) == f"camera {shown}"
    out = io.StringIO()
    ProgressLog(out)("warning", text=given)
    assert out.getvalue().count("\n") == 1 and shown in out.getvalue()


@each
def test_a_log_of_a_merge_forges_no_line(given: str, shown: str) -> None:
    repair = {"query": given, "repair": given, "required": 0.9, "ratio": 0.8, "flops": 1.0}
    text = MergeOutcomes((), (repair,), (), given).to_text()
    assert len(text.split("\n")) == 3 and all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize("encoding", ["ascii", "utf-8", "latin-1"])
def test_a_result_can_be_shown_wherever_it_goes(encoding: str) -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    cli._print("caf\xe9 \udc80\n\x1b[31m\u202e", out)
    lines = raw.getvalue().decode(encoding).split("\n")
    assert lines[1:] == ["\\x1b[31m\\u202e", ""] and lines[0].endswith(" \\udc80")


def test_json_holds_what_was_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = "".join(bad for bad, _ in HARM.values())
    result = Invocation(lambda: CommandResult({"given": given}, ""), as_json=True)
    monkeypatch.setattr("gemel.cli.parse_command", lambda _: result)
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"given": given}


def test_a_usage_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "x", "--se\ned"]) == 2 and capsys.readouterr().err.count("\n") == 1
