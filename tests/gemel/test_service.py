"""`gemel service install`: the systemd unit of a box, and its warnings."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from edge_runtime.service import ALIVE, READY, Notifier
from gemel import service
from gemel.cli import main
from tests.edge_runtime.tiny import write_config

MAX_EXPOSED = 20
"""Of 100, as `systemd-analyze security` counts."""


def test_notifier_writes_to_the_socket_of_systemd(tmp_path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "15000000"})
        notifier.send(READY, "STATUS=serving")
        assert manager.recv(100) == b"READY=1\nSTATUS=serving" and notifier.alive_interval_s == 5.0
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).send(ALIVE)
    assert Notifier({"WATCHDOG_USEC": "0"}).alive_interval_s is None


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "spool").mkdir()
    return write_config(tmp_path, spool="spool", sinks=[{"kind": "jsonl", "path": "results.jsonl"}])


def test_install_unit_is_valid_for_systemd(config, tmp_path, capsys):
    path = tmp_path / "gemel.service"
    assert main(["service", "install", str(config), "-o", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unit"] == str(path)
    text = path.read_text()
    assert f'-P -m gemel run "{config}"' in text and f'ReadWritePaths="{tmp_path / "spool"}"' in text
    assert main(["service", "install", str(config), "-o", str(path), "--user", "camera"]) == 0
    assert "User=camera" in path.read_text() and "DynamicUser" not in path.read_text()
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here")
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", path], capture_output=True, text=True, check=False
    )
    wrong = [line for line in checked.stderr.splitlines() if "gemel.service" in line]
    assert wrong == []
    bounds = ["systemd-analyze", "security", "--offline=true", f"--threshold={MAX_EXPOSED}", path]
    judged = subprocess.run(bounds, capture_output=True, text=True, check=False)
    assert judged.returncode == 0, judged.stdout.splitlines()[-1:]


def install(config: Path, capsys, *more: str) -> tuple[str, str]:
    """The unit, and the warnings."""
    path = config.parent / "made.service"
    assert main(["service", "install", str(config), "-o", str(path), "--json", *more]) == 0
    return path.read_text(), "\n".join(json.loads(capsys.readouterr().out)["warnings"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_install_runs_as_the_owner_of_the_config(config, capsys):
    nobody = pwd.getpwnam("nobody")
    os.chown(config, nobody.pw_uid, nobody.pw_gid)
    text, warnings = install(config, capsys)
    assert "User=nobody" in text and warnings == ""


def test_install_warns_of_what_the_user_cannot_reach(config, capsys, monkeypatch):
    monkeypatch.setattr(service, "find_owner", lambda _: None)
    config.parent.chmod(0o755)
    config.chmod(0o600)
    text, warnings = install(config, capsys)
    assert "DynamicUser=yes" in text and "StateDirectory=%N" in text
    assert f"{config.parent}: the service's user cannot write there" in warnings
    assert f"{config}: the service's user cannot read it" in warnings
    assert install(config, capsys, "--user", "camera")[1] == ""
    config.chmod(0o644)
    monkeypatch.setattr(service, "STATE_FOLDER", config.parent.parent)
    assert install(write_config(config.parent), capsys)[1] != "", "below another unit's folder"
    (config.parent.parent / "made").mkdir(exist_ok=True)
    results = [{"kind": "jsonl", "path": "../made/results.jsonl"}]
    assert install(write_config(config.parent, sinks=results), capsys)[1] == ""


def test_install_environment_file_sets_variables(tmp_path, capsys, monkeypatch):
    cameras = {"left": {"source": "rtsp://box:${GATE}@10.0.0.5/1"}}
    made, variables = write_config(tmp_path, cameras=cameras), tmp_path / "box.env"
    assert main(["service", "install", str(made), "-o", str(tmp_path / "unit")]) == 2
    assert "the environment has no GATE" in capsys.readouterr().err
    variables.write_text("# of the gate\nGATE='s3cret'\n")
    assert "box.env can be read by every user" in install(made, capsys, "--environment", str(variables))[1]
    variables.chmod(0o600)
    text, warnings = install(made, capsys, "--environment", str(variables), "--user", "camera")
    assert f"EnvironmentFile={variables}\n" in text and "s3cret" not in text and warnings == ""
    monkeypatch.setenv("GATE", "s3cret")
    assert "a service has no GATE" in install(made, capsys, "--user", "camera")[1]


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"device": "cpu"}, "PrivateDevices=yes"),
        ({"device": "auto"}, "SupplementaryGroups=video"),
        ({"device": "cpu", "cameras": {"left": {"source": 0}}}, "SupplementaryGroups=video"),
    ],
)
def test_install_grants_devices_only_where_needed(tmp_path: Path, capsys, keys: dict, line: str):
    text, _ = install(write_config(tmp_path, **keys), capsys)
    assert ("PrivateDevices=yes" in text) + ("SupplementaryGroups=video" in text) == 1 and line in text


def test_install_keeps_a_unit_of_others(config, tmp_path, capsys):
    path = tmp_path / "gemel.service"
    path.write_text("[Unit]\n")
    assert main(["service", "install", str(config), "-o", str(path)]) == 2
    assert path.read_text() == "[Unit]\n" and "was not written by Gemel" in capsys.readouterr().err
    path.write_text(service.UNIT_MARK)
    assert main(["service", "install", str(config), "-o", str(path)]) == 0


def test_install_name_with_line_break_is_refused(tmp_path: Path, capsys):
    folder = tmp_path / "a\nExecStartPre=id"
    folder.mkdir()
    assert main(["service", "install", str(write_config(folder)), "-o", str(tmp_path / "unit")]) == 2
    assert not (tmp_path / "unit").exists() and "cannot be written in a systemd unit" in capsys.readouterr().err


@pytest.mark.parametrize("user", ["a b", "x\nExecStartPre=id", "9lives"])
def test_install_bad_user_name_is_refused(config: Path, tmp_path: Path, user: str):
    assert main(["service", "install", str(config), "-o", str(tmp_path / "unit"), "--user", user]) == 2
    assert not (tmp_path / "unit").exists()
