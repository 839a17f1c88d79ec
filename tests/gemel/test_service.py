"""`gemel service install`: the systemd unit of a box, and its warnings."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from gemel import service
from gemel.cli import main
from gemel.edge_runtime.life.config import any_device, load_config
from gemel.edge_runtime.life.service import ALIVE, READY, Notifier
from tests.certificates import write_certificate
from tests.edge_runtime.tiny import write_config

MAX_EXPOSED = 20
"""Of 100, as `systemd-analyze security` counts."""
TOKEN = "a-token-of-32-characters-or-more"


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
    assert "User=nobody" in text and f"{config.parent}: the service's user cannot write there" in warnings
    for path in (config.parent, *config.parent.iterdir()):
        os.chown(path, nobody.pw_uid, nobody.pw_gid)
    assert install(config, capsys)[1] == ""


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


def write_secrets(config: Path) -> Path:
    """The config with a token, TLS of both kinds and a public key, all private to root."""
    cert, key = write_certificate(config.parent)
    (config.parent / "token").write_text(TOKEN)
    (config.parent / "key.pub").write_text("ab" * 32)
    tls = {"cert": cert.name, "key": key.name}
    sinks = [
        {"kind": "jsonl", "path": "results.jsonl"},
        {"kind": "mqtt", "host": "127.0.0.1", "topic": "t", "tls": tls},
    ]
    http = {"bind": "127.0.0.1:0", "token_file": "token", "tls": tls}
    path = write_config(config.parent, sinks=sinks, http=http, public_key="key.pub")
    for name in ("token", "key.pub", key.name):
        (config.parent / name).chmod(0o600)
    return path


def test_install_hands_over_secrets_that_the_user_cannot_read(config, capsys, monkeypatch):
    """No warning advises to let others read a secret; the box reads what systemd shows to it alone."""
    monkeypatch.setattr(service, "find_owner", lambda _: None)
    path = write_secrets(config)
    text, warnings = install(path, capsys)
    assert "read" not in warnings and "let others" not in warnings
    given = dict(re.findall(r"^LoadCredential=([^:]+):(.+)$", text, re.MULTILINE))
    assert given.keys() == {
        "http.token_file", "http.tls.cert", "http.tls.key", "sinks.1.tls.cert", "sinks.1.tls.key", "public_key",
    }  # fmt: skip
    credentials = config.parent / "credentials"
    credentials.mkdir()
    for key, written in given.items():
        Path(written).rename(credentials / key) if Path(written).exists() else (credentials / key).touch()
    box = load_config(path, {"CREDENTIALS_DIRECTORY": str(credentials)}, any_device)
    assert box.http is not None and box.http.token == TOKEN and box.token_file == credentials / "http.token_file"
    assert box.http.tls is not None and box.http.tls.key == credentials / "http.tls.key"
    tls = getattr(box.sinks[1], "tls", None)
    assert tls is not None and (tls.cert, tls.key) == (
        credentials / "sinks.1.tls.cert",
        credentials / "sinks.1.tls.key",
    )
    assert box.public_key == credentials / "public_key"


def test_install_leaves_secrets_that_the_user_can_read_in_place(config, capsys):
    path = write_secrets(config)
    for name in ("token", "key.pub", "box.key"):
        (config.parent / name).chmod(0o644)
    assert "LoadCredential" not in install(path, capsys, "--user", "nobody")[0]


def test_install_shows_of_homes_only_what_the_box_needs(config, capsys, monkeypatch):
    home = config.parent.parent
    monkeypatch.setattr(service, "USER_HOMES", (home,))
    text, warnings = install(config, capsys)
    assert "ProtectHome=tmpfs" in text and "sees all of this home" in warnings
    folder = config.parent / "box"
    folder.mkdir()
    for name in ("tiny.safetensors", "left.mp4", "right"):
        if (config.parent / name).exists():
            (config.parent / name).rename(folder / name)
    text, warnings = install(write_config(folder, sinks=[{"kind": "jsonl", "path": "out/results.jsonl"}]), capsys)
    assert f'BindPaths="{folder}/out"' in text and f'BindReadOnlyPaths="{folder}"' in text
    assert f'"{config.parent}"' not in text and "sees all of this home" not in warnings


def test_install_bounds_memory_and_tasks(config, capsys):
    text, _ = install(config, capsys)
    memory = int(re.findall(r"^MemoryMax=(\d+)$", text, re.MULTILINE)[0])
    assert memory > 2 * 64 * 2**20 + 2**31 and re.search(r"^TasksMax=\d+$", text, re.MULTILINE)
    larger = install(write_config(config.parent, budget="8GiB"), capsys)[0]
    assert int(re.findall(r"^MemoryMax=(\d+)$", larger, re.MULTILINE)[0]) > memory + 2**33


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
