"""Entry points: those of this project, those of others, and what one line says where they are no good."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gemel.edge_runtime.policies import POLICIES, policy_named
from gemel.edge_runtime.policies.gemel import GemelPolicy
from gemel.edge_runtime.sinks.base import SINKS
from gemel.models.decoders import choose_decoder
from gemel.models.decoders.decoder import GraphHead, Output
from gemel.models.errors import InputError
from gemel.models.notes import collect_notes
from gemel.models.plugins import BUILT_IN, GROUPS, describe_entries, find_entries
from tests.distributions import install

YOLO = GraphHead((Output("out", (84, 525)),), (160, 160), {})


def error_of(*args: str) -> str:
    with pytest.raises(InputError) as error:
        SINKS.find(*args)
    return str(error.value)


@pytest.mark.parametrize("group", GROUPS)
def test_every_entry_of_this_project_can_be_imported(group):
    for name, points in find_entries(group).items():
        stated = getattr(points[0].load(), "name", name)
        assert not isinstance(stated, str) or stated == name


def test_pyproject_takes_the_entries_from_the_file_that_is_read(repository: Path):
    assert f'entry-points = {{file = "gemel/models/{BUILT_IN.name}"}}' in (repository / "pyproject.toml").read_text()


def test_names_are_found_without_importing_what_bears_them(repository: Path):
    code = "import sys; from gemel.models.plugins import GROUPS, describe_entries"
    code += "; [dict(describe_entries(one)) for one in GROUPS]"
    code += "; print([name for name in sys.modules if name.startswith('gemel.')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True)
    assert set(eval(done.stdout)) == {
        "gemel.models",
        "gemel.models.errors",
        "gemel.models.notes",
        "gemel.models.plugins",
    }


@pytest.mark.parametrize("group", GROUPS)
def test_every_entry_has_a_line_of_help(group):
    lines = dict(describe_entries(group))
    assert lines.keys() == find_entries(group).keys()
    assert all(len(line.split()) > 2 and len(line) < 120 for line in lines.values()), lines


def test_help_of_an_entry_is_read_from_its_source_alone(tmp_path, monkeypatch):
    code = 'raise RuntimeError\nclass Lines:\n    """Writes 0.5 of it.\x1b\n\n    And more."""'
    entries = {"ours": "stranger:Lines", "none": "stranger:Absent", "gone": "no_such_module:Lines"}
    install(tmp_path, monkeypatch, "stranger", {"gemel.sinks": entries}, stranger=code)
    lines = dict(describe_entries("gemel.sinks"))
    assert lines["ours"] == r"Writes 0.5 of it.\x1b And more"
    assert lines["none"] == lines["gone"] == ""


def test_metadata_of_another_checkout_of_this_project_do_not_count(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "gemel", {"gemel.sinks": {"jsonl": "os:system", "old": "os:system"}})
    assert "old" not in SINKS and SINKS["jsonl"].__name__ == "JsonLinesConfig"


def test_name_of_two_distributions_is_refused_naming_both(tmp_path, monkeypatch):
    for name in ("first", "second"):
        install(tmp_path / name, monkeypatch, name, {"gemel.sinks": {"redis": f"{name}:Redis"}})
    assert error_of("redis", "box.yaml", "sinks[0].kind") == (
        "box.yaml: sinks[0].kind: the sink 'redis' is registered by second 1.0 (second:Redis) and by first 1.0 "
        "(first:Redis); uninstall one of them"
    )
    install(tmp_path / "third", monkeypatch, "third", {"gemel.sinks": {"jsonl": "third:Lines"}})
    assert "'jsonl' is registered by gemel and by third 1.0 (third:Lines)" in error_of("jsonl")


@pytest.mark.parametrize(
    ("text", "extra", "fault"),
    [
        ("import no_such_module", "", "needs no_such_module, which is not installed; pip install no_such_module"),
        ("import no_such_module", " [fast]", "which is not installed; pip install stranger[fast]"),
        ("1 / 0", "", "cannot be imported: ZeroDivisionError: division by zero; mend or uninstall stranger"),
        ("", "", "cannot be imported: AttributeError"),
        ("class Fax: pass", "", "the sink 'fax' is no SinkConfig; mend its package"),
        ("Fax = 3", "", "the sink 'fax' is no SinkConfig"),
    ],
)
def test_entry_that_is_no_good_is_one_line_for_who_asks_for_it(tmp_path, monkeypatch, text, extra, fault):
    entry = {"fax": f"fax_machine:Fax{extra}"}
    install(tmp_path, monkeypatch, "stranger", {"gemel.sinks": entry}, fax_machine=text)
    monkeypatch.delitem(sys.modules, "fax_machine", raising=False)
    assert fault in (line := error_of("fax")) and "\n" not in line
    assert "is no" in line or line.startswith("sink: the sink 'fax' of stranger 1.0 (fax_machine:Fax")
    assert SINKS["jsonl"].__name__ == "JsonLinesConfig", "the others go on"


def test_decoder_that_cannot_be_imported_is_noted_and_the_others_go_on(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "stranger", {"gemel.decoders": {"broken": "no_such_module:Broken"}})
    with collect_notes() as notes:
        assert choose_decoder("auto", YOLO, "detection", 80, "model.onnx").name == "yolo"
    assert notes == [
        "decoder: the decoder 'broken' of stranger 1.0 (no_such_module:Broken) needs no_such_module, which is not "
        "installed; pip install no_such_module"
    ]
    with pytest.raises(InputError, match=r"model\.onnx: decoder: the decoder 'broken' of stranger"):
        choose_decoder("broken", YOLO, "detection", 80, "model.onnx")


def test_metadata_that_cannot_be_read_are_noted(tmp_path, monkeypatch):
    def fail(**_: object) -> None:
        raise ValueError("cut short")

    own = list(SINKS)
    monkeypatch.setattr("gemel.models.plugins.entry_points", fail)
    monkeypatch.syspath_prepend(tmp_path)
    with collect_notes() as notes:
        assert list(SINKS) == own
    assert notes == ["installed packages: their metadata cannot be read: ValueError: cut short"]


def test_options_are_the_fields_of_the_dataclass_and_checked():
    assert policy_named("gemel:patience=5") == GemelPolicy(patience=5) == POLICIES["gemel:patience=5"]
    for text, fault in {
        "gemel:name=x": "--policy: name: unknown key; remove it; the keys here are patience",
        "gemel:patience=soon": "--policy: patience: input should be a valid integer",
        "adaptive:x=1": "--policy: x: unknown key",
    }.items():
        with pytest.raises(InputError, match=fault):
            policy_named(text)


@pytest.mark.parametrize("name", ["os:system", "os.path:join", "gemel.models.plugins", "../jsonl", "", "JSONL"])
def test_nothing_but_a_registered_name_is_a_name(name):
    assert name not in SINKS and "there is no sink" in error_of(name)
