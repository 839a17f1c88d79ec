"""The command line: light help, JSON everywhere, and each error in one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gemel import cli
from gemel.cli import main
from gemel.commands import CommandResult, Invocation

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "torchvision", "numpy", "cv2", "pydantic", "yaml", "jinja2", "matplotlib", "rich")
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


def python(*words):
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


def one_line(text):
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    return lines[0]


def test_help_imports_nothing_heavy():
    script = (
        "import sys\nfrom gemel.cli import main\n"
        "assert main(['--help']) == 0\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = python("-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    for command in ("demo", "inspect", "train", "merge", "bundle", "run", "eval", "simulate", "plan"):
        assert f"  {command} " in done.stdout


def commands_of(group, words=()):
    """Every command, by the words that call it."""
    if not hasattr(group, "commands"):
        return {words: group}
    return {key: one for name, sub in group.commands.items() for key, one in commands_of(sub, (*words, name)).items()}


def test_every_command_takes_json_and_has_help():
    found = commands_of(cli.command_tree())
    assert len(found) >= 19
    for words, command in found.items():
        assert any("--json" in parameter.opts for parameter in command.params), words
        assert command.help and all(one.help for one in command.params), words


@pytest.mark.parametrize("words", [[], ["frobnicate"], ["merge"], ["merge", "w.yaml"], ["simulate", "w", "--seed", "x"],
                                   ["bundle"], ["eval", "b", "w", "-o", "d", "--seeds", "0"],
                                   ["simulate", "w", "--duration", "-1"]])  # fmt: skip
def test_usage_error_is_one_line_and_exit_code_2(words, capsys):
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == "" and one_line(said.err).startswith("gemel")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("input_size: 32", "input_size: 32, colour: red"), "colour"),
        (("camera: gate, task", "camera: fence, task"), "fence"),
        (("id: b", "id: a"), "occurs twice"),
        (("classes: [x, y],", "classes: [x],"), "classes"),
        (("mobilenet_v3_small", "mobilenet_v9"), "mobilenet_v9"),
        (("input_size: 32", "input_size: big"), "input_size"),
        (("name: two", "name: [two"), "YAML"),
    ],
)
def test_bad_workload_is_one_line_that_names_file_and_key(workload, capsys, change, named):
    workload.write_text(WORKLOAD.replace(change[0], change[1], 1))
    assert main(["inspect", str(workload), "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert str(workload) in one_line(said.err) and named in said.err


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "absent.yaml"],
        ["train", "absent.yaml"],
        ["merge", "absent.yaml", "-o", "b.safetensors"],
        ["bundle", "show", "absent.safetensors"],
        ["bundle", "verify", "absent.safetensors"],
        ["run", "absent.yaml"],
        ["eval", "absent.safetensors", "absent.yaml", "-o", "report"],
        ["simulate", "absent.safetensors"],
        ["simulate", "absent.yaml", "--device", "toaster"],
    ],
)
def test_missing_file_is_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == "" and one_line(said.err).startswith("gemel: ")
    assert not list(tmp_path.iterdir())


def test_merge_without_weights_or_onto_a_file_is_refused(workload, tmp_path, capsys):
    assert main(["merge", str(workload), "-o", str(tmp_path / "b.safetensors")]) == 2
    assert "weights" in capsys.readouterr().err.splitlines()[-1], "after the stage that it came up in"
    assert main(["merge", str(workload), "-o", str(workload)]) == 2
    assert "--out: is the workload" in one_line(capsys.readouterr().err)
    (tmp_path / "kept").write_text("")
    assert main(["merge", str(workload), "-o", str(tmp_path / "kept")]) == 2
    assert "exists already" in one_line(capsys.readouterr().err)
    (tmp_path / "kept").unlink()
    assert main(["merge", str(workload), "-o", str(tmp_path / "absent" / "b.safetensors")]) == 2
    assert "no directory" in one_line(capsys.readouterr().err)
    assert main(["merge", str(workload), "-o", str(tmp_path / "b.safetensors"), "--method", "magic"]) == 2
    assert "magic" in one_line(capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == ["workload.yaml"]


def test_inspect_without_weights_has_the_promised_keys(workload, capsys):
    assert main(["inspect", str(workload), "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert {"queries", "total_bytes", "groups", "ceiling_fraction"} <= set(found)
    assert {"id", "model", "layers", "bytes"} <= set(found["queries"][0])
    assert {"signature", "bytes", "members", "saved_bytes"} <= set(found["groups"][0])
    assert found["total_bytes"] == sum(query["bytes"] for query in found["queries"])
    assert 0.4 < found["ceiling_fraction"] < 0.5  # two equal backbones; heads and norms stay private
    assert found["ceiling_bytes"] == sum(group["saved_bytes"] for group in found["groups"])
    assert main(["inspect", str(workload)]) == 0
    assert "in groups" in capsys.readouterr().out


def run_result(monkeypatch, behaviour):
    """The exit code of a command that does this."""
    monkeypatch.setattr(cli, "parse_command", lambda _: Invocation(behaviour, as_json=True))
    return main(["inspect", "any.yaml", "--json"])


def test_exit_codes_of_what_can_happen(monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    def full():
        raise OSError(28, "No space left on device", "out/bundle")

    assert run_result(monkeypatch, lambda: CommandResult({"ok": False}, "", 1)) == 1
    assert run_result(monkeypatch, interrupt) == 130
    assert run_result(monkeypatch, full) == 2
    assert "out/bundle: No space left on device" in capsys.readouterr().err


def test_json_is_one_object_whatever_libraries_print(monkeypatch, capsys):
    def chatty():
        print("downloading ...")
        return CommandResult({"ratio": float("nan"), "ids": ("a", "b"), "infinite": float("inf")}, "")

    assert run_result(monkeypatch, chatty) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"ratio": None, "ids": ["a", "b"], "infinite": None}
    assert "downloading" in said.err


def test_closed_pipe_is_no_error():
    read, write = os.pipe()
    os.close(read)
    script = (
        "import sys; from gemel import cli\n"
        "from gemel.commands import CommandResult, Invocation\n"
        "cli.parse_command = lambda _: Invocation(lambda: CommandResult({}, 'x' * 100000), False)\n"
        "sys.exit(cli.main(['inspect', 'w']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, stdout=write, stderr=subprocess.PIPE, timeout=240, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
