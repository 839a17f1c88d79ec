"""Notes reach the terminal once, the JSON of a command, and the logger of a program that uses the library."""

from __future__ import annotations

import json
import threading

import pytest

from gemel import cli
from gemel.invocation import CommandResult, Invocation
from gemel.models.notes import MAX_NOTES, add_note, collect_notes


def test_collect_notes_keeps_each_note_once_from_any_thread():
    heard: list[str] = []
    with collect_notes(heard.append) as notes:
        add_note("a.pt", "EMA weights taken", "give the raw ones as a file of their own")
        thread = threading.Thread(target=add_note, args=("clip.mp4", "41 of 60 frames\ndid not decode"))
        thread.start()
        thread.join()
        add_note("a.pt", "EMA weights taken", "give the raw ones as a file of their own")
    assert notes == heard
    assert notes == [
        "a.pt: EMA weights taken; give the raw ones as a file of their own",
        "clip.mp4: 41 of 60 frames\\ndid not decode",
    ]


def test_collect_notes_is_bounded():
    with collect_notes() as notes:
        for index in range(MAX_NOTES + 5):
            add_note("a", str(index))
    assert len(notes) == MAX_NOTES


def test_add_note_without_a_command_is_a_warning_of_the_logger(caplog: pytest.LogCaptureFixture):
    add_note("a.pt", "EMA weights taken")
    assert caplog.messages == ["a.pt: EMA weights taken"]


@pytest.mark.parametrize("own", [{}, {"notes": ["own"]}])
def test_command_prints_notes_and_returns_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], own: dict
):
    def run() -> CommandResult:
        add_note("a.pt", "EMA weights taken")
        return CommandResult({"value": 1, **own}, "done")

    monkeypatch.setattr(cli, "parse_command", lambda words: Invocation(run, as_json=True))
    assert cli.main([]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"value": 1, "notes": [*own.get("notes", []), "a.pt: EMA weights taken"]}
    assert printed.err == "note: a.pt: EMA weights taken\n"
