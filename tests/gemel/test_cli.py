"""The command line: JSON everywhere, and each error in one line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gemel import cli
from gemel.cli import main
from gemel.invocation import CommandResult, Invocation

ROOT = Path(__file__).resolve().parents[2]
WORKLOAD = """
name: two
cameras: {gate: {source: gate.mp4, fps: 5}}
queries:
  - {id: a, camera: gate, task: classification, classes: [x, y], model: mobilenet_v3_small, input_size: 32}
  - {id: b, camera: gate, task: classification, classes: [x, y, z], model: mobilenet_v3_small, input_size: 32}
"""


@pytest.fixture
def workload(tmp_path):
    path = tmp_path / "workload.yaml"
    path.write_text(WORKLOAD)
    return path


def run_refused(capsys, *words):
    """The one line of an error of a command that is bad input."""
    assert main([str(word) for word in words]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and printed.err.startswith("gemel")
    return printed.err


def list_commands(group, words=()):
    """Every command, by the words that call it."""
    if not hasattr(group, "commands"):
        return {words: group}
    found = (list_commands(sub, (*words, name)) for name, sub in group.commands.items())
    return {key: command for one in found for key, command in one.items()}


def test_every_command_takes_json_and_has_help():
    found = list_commands(cli.command_tree())
    assert len(found) >= 19
    for words, command in found.items():
        assert any("--json" in parameter.opts for parameter in command.params), words
        assert command.help and all(one.help for one in command.params), words


@pytest.mark.parametrize("group", [[], ["bundle"], ["config"], ["drift"], ["service"]])
def test_list_of_commands_says_of_each_what_it_does_in_eighty_columns(monkeypatch, capsys, group):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*group, "--help"]) == 0
    (_, listed) = capsys.readouterr().out.split("Commands:\n")
    assert listed.count("\n") >= 1 and not [line for line in listed.splitlines() if line.endswith("...")]


def test_version_is_printed(capsys):
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"gemel \d+\.\d+\S*\n", capsys.readouterr().out)


@pytest.mark.parametrize("words", [
    "", "frobnicate", "merge", "merge w.yaml", "bundle", "simulate w --seed x", "simulate w --duration -1",
    "eval b w -o d --seeds 0", "merge w -o b --weights int5", "plan b --factory os.system",
    "bundle export b --query q -o o --batch 0",
])  # fmt: skip
def test_usage_error_is_one_line_and_exit_code_2(words, capsys):
    assert "--help" in run_refused(capsys, *words.split())


@pytest.mark.parametrize(("change", "named"), [
    (("input_size: 32", "input_size: 32, colour: red"), "colour"),
    (("camera: gate, task", "camera: fence, task"), "fence"),
    (("id: b", "id: a"), "occurs twice"), (("classes: [x, y],", "classes: [x],"), "classes"),
    (("mobilenet_v3_small", "mobilenet_v9"), "mobilenet_v9"), (("input_size: 32", "input_size: big"), "input_size"),
    (("name: two", "name: [two"), "YAML"),
])  # fmt: skip
def test_bad_workload_is_one_line_that_names_file_and_key(workload, capsys, change, named):
    workload.write_text(WORKLOAD.replace(change[0], change[1], 1))
    line = run_refused(capsys, "inspect", workload, "--json")
    assert str(workload) in line and named in line


@pytest.mark.parametrize("words", [
    "inspect absent.yaml", "train absent.yaml", "merge absent.yaml -o b.safetensors", "bundle show absent.safetensors",
    "bundle verify absent.safetensors", "run absent.yaml", "eval absent.safetensors absent.yaml -o report",
    "simulate absent.safetensors", "simulate absent.yaml --device toaster",
])  # fmt: skip
def test_missing_file_is_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    run_refused(capsys, *words.split())
    assert not list(tmp_path.iterdir())


def test_merge_without_weights_or_onto_a_file_is_refused(workload, tmp_path, capsys):
    assert main(["merge", str(workload), "-o", str(tmp_path / "b.safetensors")]) == 2
    assert "weights" in capsys.readouterr().err.splitlines()[-1], "after the stage that it came up in"
    assert "--out: is the workload" in run_refused(capsys, "merge", workload, "-o", workload)
    (tmp_path / "kept").write_text("")
    assert "exists already" in run_refused(capsys, "merge", workload, "-o", tmp_path / "kept")
    assert "no directory" in run_refused(capsys, "merge", workload, "-o", tmp_path / "absent" / "b.safetensors")
    assert "magic" in run_refused(capsys, "merge", workload, "-o", tmp_path / "b.safetensors", "--method", "magic")
    assert {path.name for path in tmp_path.iterdir() if path.suffix != ".lock"} == {"workload.yaml", "kept"}


def run_result(monkeypatch, behaviour):
    """The exit code of a command that does this."""
    monkeypatch.setattr(cli, "parse_command", lambda _: Invocation(behaviour, as_json=True))
    return main(["inspect", "any.yaml", "--json"])


def test_exit_codes_of_what_can_happen(monkeypatch, capsys):
    def raise_error(error):
        raise error

    full = OSError(28, "No space left on device", "out/bundle")
    assert run_result(monkeypatch, lambda: CommandResult({"ok": False}, "", 1)) == 1
    assert run_result(monkeypatch, lambda: raise_error(KeyboardInterrupt())) == 130
    for error, text in (
        (full, "out/bundle: No space left on device"), (MemoryError(), "no more memory"),
        (ImportError("libfoo.so"), "a library cannot be loaded: libfoo.so"),
    ):  # fmt: skip
        assert run_result(monkeypatch, lambda error=error: raise_error(error)) == 2
        assert text in capsys.readouterr().err


def test_json_is_one_object_whatever_libraries_print(monkeypatch, capsys):
    def chatty():
        print("downloading ...")
        return CommandResult({"ratio": float("nan"), "ids": ("a", "b"), "infinite": float("inf")}, "")

    assert run_result(monkeypatch, chatty) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"ratio": None, "ids": ["a", "b"], "infinite": None}
    assert "downloading" in printed.err


def test_closed_pipe_is_no_error():
    read, write = os.pipe()
    os.close(read)
    script = (
        "import sys; from gemel import cli\n"
        "from gemel.invocation import CommandResult, Invocation\n"
        "cli.parse_command = lambda _: Invocation(lambda: CommandResult({}, 'x' * 100000), False)\n"
        "sys.exit(cli.main(['inspect', 'w']))"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, timeout=240, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
