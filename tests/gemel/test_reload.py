"""`gemel reload` against a real box: applied, refused, no box running."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from gemel.cli import main
from tests.edge_runtime.local_box import LocalBox, replace_bundle
from tests.edge_runtime.tiny import query, tiny_bundle, trained_looking, write_clip, write_config, write_folder

TOKEN = "a-token-of-the-tests"
CAMERAS = {"left": {"source": "left.mp4", "loop": True}, "right": {"source": "right", "fps": 12, "loop": True}}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A box that can be run_reload over HTTP."""
    write_clip(tmp_path / "left.mp4", 12)
    write_folder(tmp_path / "right", 4)
    tiny_bundle(tmp_path / "tiny.safetensors")
    (tmp_path / "token").write_text(TOKEN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return write_config(tmp_path, cameras=CAMERAS, http={"bind": f"127.0.0.1:{port}", "token_file": "token"})


def run_reload(config: Path, capsys) -> tuple[int, dict]:
    code = main(["reload", str(config), "--json"])
    return code, json.loads(capsys.readouterr().out)


def get_text(config: Path, path: str) -> str:
    port = config.read_text().partition("127.0.0.1:")[2].split()[0].strip("'")
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


def test_reload_is_applied_or_refused(config, capsys):
    folder = config.parent
    with LocalBox(config) as box:
        box.more("gate")
        replace_bundle(folder / "tiny.safetensors", {"gate": trained_looking(7)}, query("gate", "left"))
        assert run_reload(config, capsys) == (0, {"applied": True, "reason": None})
        status = json.loads(get_text(config, "/api/status"))
        assert [one["id"] for one in status["queries"]] == ["gate"] and status["reloads"]["applied"] == 1
        (folder / "tiny.safetensors").unlink()
        code, found = run_reload(config, capsys)
        assert code == 1 and not found["applied"] and "cannot be read" in found["reason"]
        status = json.loads(get_text(config, "/api/status"))
        assert status["refused"] == found["reason"] and status["bundle_fault"] is None
        metrics = get_text(config, "/metrics")
        assert 'gemel_reloads_total{outcome="applied"} 1.0' in metrics
        assert 'gemel_reloads_total{outcome="refused"} 1.0' in metrics and 'query="yard"' not in metrics
        assert main(["reload", str(config)]) == 1
        assert found["reason"] in capsys.readouterr().out
        (folder / "token").write_text("another-token-of-the-tests")
        assert main(["reload", str(config)]) == 2
        assert "http.token_file" in capsys.readouterr().err
    assert main(["reload", str(config)]) == 2
    assert "no box answers" in capsys.readouterr().err


def test_reload_without_http_is_refused(config, capsys):
    write_config(config.parent, cameras=CAMERAS)
    assert main(["reload", str(config)]) == 2
    said = capsys.readouterr().err
    assert "send the process SIGHUP" in said and said.count("\n") == 1


def test_sighup_takes_up_a_new_bundle_and_the_service_manager_hears_of_it(config, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")}
        run = [sys.executable, "-m", "gemel", "run", str(config), "--json"]
        with subprocess.Popen(run, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as box:
            assert manager.recv(1000) == b"READY=1"
            replace_bundle(tmp_path / "tiny.safetensors", {"gate": trained_looking(7)}, query("gate", "left"))
            box.send_signal(signal.SIGHUP)
            assert manager.recv(1000).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
            assert manager.recv(1000) == b"READY=1"
            box.terminate()
            out, _ = box.communicate(timeout=60)
    summary = json.loads(out)
    assert (
        box.returncode == 0 and summary["reloads"] == {"applied": 1, "partly": 0, "refused": 0} and summary["balanced"]
    )
    assert [one["id"] for one in summary["queries"]] == ["gate"]
    assert [row["query"] for row in summary["ledger"]] == ["gate", "yard", "road"]
