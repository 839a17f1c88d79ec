"""`gemel doctor`: a machine is measured and nothing is left behind."""

from __future__ import annotations

import json

import pytest

import gemel.doctor as doctor
from gemel.cli import main
from gemel.doctor import diagnose
from gemel.models.errors import InputError
from tests.distributions import install


def test_diagnose_leaves_no_file(tmp_path):
    found = diagnose(tmp_path, copy_bytes=2**20, storage_bytes=2**20).to_json()
    assert {"device", "copy_gb_s", "storage_gb_s", "engines"} <= set(found)
    assert found["copy_gb_s"] > 0 and found["storage_gb_s"] > 0
    engines = {engine["engine"]: engine for engine in found["engines"]}
    assert engines["torch"]["available"] and "torch" in engines["torch"]["detail"]
    assert list(tmp_path.iterdir()) == []


def test_diagnose_text_names_how_storage_was_read(tmp_path):
    text = diagnose(tmp_path, copy_bytes=2**20, storage_bytes=2**20).to_text()
    assert "GB/s" in text and "posix_fadvise" in text and str(tmp_path) in text
    assert text.count("models of others are read in a child with limits of memory and time") == 1


def test_doctor_missing_folder_is_one_line(tmp_path, capsys):
    with pytest.raises(InputError, match="storage cannot be measured here"):
        diagnose(tmp_path / "absent", copy_bytes=1, storage_bytes=1)
    assert main(["doctor", "--folder", str(tmp_path / "absent"), "--json"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_doctor_json_is_one_object(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("gemel.doctor.diagnose", lambda folder: diagnose(folder, 2**20, 2**20))
    assert main(["doctor", "--folder", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] in ("cpu", "cuda")


def test_doctor_names_what_others_have_registered(tmp_path, monkeypatch):
    install(tmp_path / "site", monkeypatch, "stranger", {"gemel.sinks": {"pigeon": "stranger:Pigeon"}})
    (tmp_path / "storage").mkdir()
    found = diagnose(tmp_path / "storage", copy_bytes=2**20, storage_bytes=2**20)
    assert found.to_json()["others"] == [{"kind": "sink", "name": "pigeon", "package": "stranger 1.0"}]
    assert "\nsink pigeon: of stranger 1.0\n" in found.to_text()


def test_doctor_marks_what_never_ran(tmp_path, monkeypatch):
    found = diagnose(tmp_path, copy_bytes=2**20, storage_bytes=2**20)
    engines = {engine["engine"]: engine for engine in found.engines}
    assert engines["torch"]["proved"] and "never run" not in engines["torch"]["detail"]
    assert engines["onnx"]["proved"] and engines["onnx"]["available"]
    for what in ("CUDA", "NCCL", "GStreamer"):
        assert what in found.to_text() and any(what in one for one in found.to_json()["unproved"])
    assert not any(engine["proved"] for engine in doctor._describe_engines("cuda")), "no engine ever ran on a GPU"
