"""`gemel config check` names all faults of a file at once, and what became of keys of earlier versions."""

from __future__ import annotations

import json

import pytest

from gemel.cli import main
from gemel.config_check import CHANGES, check_config
from gemel.models.errors import InputError
from tests.edge_runtime.tiny import write_config
from tests.gemel.test_run import box  # noqa: F401


def faults(path) -> dict[str, str]:
    """The problems of a file by key."""
    with pytest.raises(InputError) as error:
        check_config(path)
    return {one.key: one.problem for one in (error.value, *error.value.others)}


def test_all_values_that_do_not_fit_are_named_at_once(tmp_path):
    cameras = {"a": {"source": "a.mp4", "decode": "fpga"}, "b": {"source": "push"}}
    path = write_config(
        tmp_path, budget="lots", engine="warp", policy="luck", sinks=[{"kind": "telex"}], cameras=cameras
    )
    expected = {"budget", "engine", "policy", "sinks[0].kind", "cameras.a.decode", "http.token_file"}
    assert set(faults(path)) == expected


def test_secrets_stay_hidden_in_every_fault(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "hunter2")
    found = faults(write_config(tmp_path, engine="${SECRET}", policy="${SECRET}"))
    assert set(found) == {"engine", "policy"} and "hunter2" not in str(found)


def test_keys_of_earlier_versions_are_told_as_changed(tmp_path):
    found = faults(write_config(tmp_path, stream=True, cameras={"a": {"source": "a.mp4", "decoder": "gstreamer"}}))
    assert found == {
        "stream": "changed in 0.2.0: it is now `overflow`",
        "cameras.a.decoder": "changed in 0.2.0: it is now `decode`",
    }
    assert all(version for _, version, _ in CHANGES)


def test_unknown_keys_may_be_of_a_later_version(tmp_path, capsys):
    assert main(["config", "check", str(write_config(tmp_path, telepathy=True))]) == 2
    assert "a version after 0.2.0 may know it" in capsys.readouterr().err


def test_a_box_file_is_compared_with_its_bundle(box, tmp_path):  # noqa: F811
    bundle, source = str(box / "tiny.safetensors"), str(box / "gate.mp4")
    yard = {"source": source}
    sound = check_config(write_config(tmp_path, bundle=bundle, cameras={"gate": yard, "yard": yard}))
    assert sound.kind == "box" and sound.unused == ("camera yard: no query of the bundle looks at it",)
    found = faults(
        write_config(tmp_path, bundle=bundle, cameras={"yard": yard}, queries={"nobody": {"tracking": True}})
    )
    assert found == {
        "cameras.gate": "this camera is missing", "queries.nobody": "the bundle has no such query"
    }  # fmt: skip


@pytest.mark.parametrize(("text", "problem"), [
    ("- 1", "is not a mapping"), ("speed: 3", "has neither bundle, boxes, queries"), ("queries: [", "is not YAML"),
])  # fmt: skip
def test_other_files_are_refused_in_one_line(tmp_path, text, problem):
    path = tmp_path / "file.yaml"
    path.write_text(text)
    assert problem in faults(path)[""]


def test_workloads_and_bundles_are_told_by_their_content(box, tmp_path, capsys):  # noqa: F811
    workload = tmp_path / "workload.yaml"
    query = {
        "id": "q",
        "camera": "a",
        "task": "classification",
        "classes": ["x", "y"],
        "model": "resnet18",
        "input_size": 64,
    }
    cameras = {"a": {"source": "a.mp4"}, "b": {"source": "b.mp4"}}
    workload.write_text(json.dumps({"name": "w", "cameras": cameras, "queries": [query]}))
    assert check_config(workload).unused == ("camera b: no query looks at it",)
    assert main(["config", "check", str(box / "tiny.safetensors"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "bundle"
