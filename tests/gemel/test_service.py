"""`gemel service install` and `gemel run --supervise`: a box that the system keeps alive, or a parent of its own."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from edge_runtime.service import ALIVE, READY, Notifier
from gemel import supervising
from gemel import systemd as unit
from gemel.cli import main
from gemel.supervising import FIRST_WAIT_S, LONGEST_WAIT_S, STEADY_S, Again, again, last
from gemel.systemd import MARK
from tests.edge_runtime.running import START_S, Running
from tests.edge_runtime.tiny import tiny_bundle, write_clip, write_config


@pytest.mark.parametrize(
    ("code", "ran_s", "wait_s", "found"),
    [
        (0, 5.0, 1.0, None),
        (2, 5.0, 1.0, None),
        (130, 5.0, 1.0, None),
        (1, 5.0, 1.0, Again(1.0, 2.0)),
        (3, 5.0, 16.0, Again(16.0, LONGEST_WAIT_S)),
        (-9, 5.0, LONGEST_WAIT_S, Again(LONGEST_WAIT_S, LONGEST_WAIT_S)),
        (-11, STEADY_S, LONGEST_WAIT_S, Again(0.0, FIRST_WAIT_S)),
    ],
)
def test_what_failed_is_started_again_ever_later(code: int, ran_s: float, wait_s: float, found: Again | None) -> None:
    assert again(code, ran_s, wait_s) == found


@pytest.mark.parametrize(
    ("code", "was_asked", "found"),
    [(0, True, 0), (-15, True, 0), (-2, True, 0), (-9, True, 137), (-15, False, 143), (130, True, 130), (2, False, 2)],
)
def test_a_box_that_was_asked_to_stop_before_it_listened_has_ended_well(code: int, was_asked: bool, found: int) -> None:
    assert last(code, was_asked) == found


MAX_EXPOSED = 20
"""Of 100, as `systemd-analyze security` counts."""

SUPERVISED = """
import os, sys
from gemel.supervising import supervise
import gemel.supervising as module
module.FIRST_WAIT_S = module.POLL_INTERVAL_S = 0.01
module.SILENCE_S = float(os.environ.get("SILENCE_S", 60))
assert "torch" not in sys.modules
sys.exit(supervise([sys.executable, "-c", sys.argv[1]]))
"""


def supervised(script: str, **more) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SUPERVISED, script]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=os.getcwd(), **more)


def test_a_box_that_was_killed_runs_again_until_it_ends_well(tmp_path: Path) -> None:
    count = tmp_path / "count"
    script = (
        f"import os, pathlib; path = pathlib.Path({str(count)!r}); "
        "path.open('a').write('x'); os.kill(os.getpid(), 9) if path.stat().st_size < 3 else None"
    )
    assert supervised(script).wait(30) == 0 and count.read_text() == "xxx"


def test_a_box_that_served_and_is_silent_is_killed_and_runs_again(tmp_path: Path) -> None:
    count = tmp_path / "count"
    script = (
        f"import pathlib, time; path = pathlib.Path({str(count)!r}); path.open('a').write('x')\n"
        "from edge_runtime.service import ALIVE, READY, Notifier\n"
        "if path.stat().st_size < 2:\n"
        "    Notifier().tell(READY), Notifier().tell(ALIVE), time.sleep(60)"
    )
    with supervised(f"{script}", env={**os.environ, "SILENCE_S": "0.3"}) as running:
        assert running.wait(30) == 0 and count.read_text() == "xx"


def test_a_bad_config_is_not_tried_again(tmp_path: Path) -> None:
    count = tmp_path / "count"
    script = f"import pathlib, sys; pathlib.Path({str(count)!r}).open('a').write('x'); sys.exit(2)"
    assert supervised(script).wait(30) == 2 and count.read_text() == "x"


class Child(subprocess.Popen):
    """A box that is asked to stop while it is waited for, and hangs."""

    def __init__(self, asked: threading.Event) -> None:
        self.asked, self.waited_s, self.killed = asked, 0.0, False

    def __del__(self, **_) -> None:
        """There is no process."""

    def wait(self, timeout: float | None = None) -> int:
        if self.killed:
            return -9
        if self.asked.is_set():
            self.waited_s += timeout or 0.0
        self.asked.set()
        raise subprocess.TimeoutExpired("gemel", timeout or 0.0)

    def kill(self) -> None:
        self.killed = True


def test_a_box_that_was_told_to_stop_has_all_the_time_for_it() -> None:
    child = Child(asked := threading.Event())
    assert supervising._ended(child, asked, supervising.Listener()) == -9 and child.waited_s == supervising.TIMEOUT_S


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_reach_the_box(number: signal.Signals) -> None:
    script = (
        "import signal, sys, time\n"
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):\n"
        "    signal.signal(number, lambda number, _: (print(number, flush=True), sys.exit(0)))\n"
        "print('up', flush=True)\ntime.sleep(60)"
    )
    running = supervised(script)
    assert running.stdout is not None and running.stdout.readline() == "up\n"
    running.send_signal(number)
    assert running.wait(30) == 0 and running.stdout.read().strip() == str(int(number))


def test_the_service_manager_is_told_through_its_socket(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "15000000"})
        notifier.tell(READY, "STATUS=serving")
        assert manager.recv(100) == b"READY=1\nSTATUS=serving" and notifier.alive_every_s == 5.0
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).tell(ALIVE)
    assert Notifier({"WATCHDOG_USEC": "0"}).alive_every_s is None


def test_a_box_whose_parent_was_killed_ends_and_keeps_its_ledger(tmp_path: Path) -> None:
    tiny_bundle(tmp_path / "tiny.safetensors")
    for name in ("left", "right"):
        write_clip(tmp_path / f"{name}.mp4", 12)
    cameras = {name: {"source": f"{name}.mp4", "loop": True} for name in ("left", "right")}
    name = f"gemel-{os.getpid()}-{tmp_path.name}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as parent:
        parent.bind(f"\0{name}")
        box = Running(tmp_path, env={"NOTIFY_SOCKET": f"@{name}", "WATCHDOG_USEC": "300000"}, cameras=cameras)
        box.until(box.results)
        parent.settimeout(START_S)
        while parent.recv(100) != READY.encode():
            pass  # that it is alive it may tell before
    assert box.ended(START_S) == 1 and box.ledger()["fault"] == "what started the box is gone"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "spool").mkdir()
    return write_config(tmp_path, spool="spool", sinks=[{"kind": "jsonl", "path": "results.jsonl"}])


def test_the_unit_is_one_that_systemd_takes(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def installed(config: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[str, str]:
    """The unit, and the warnings."""
    path = config.parent / "made.service"
    assert main(["service", "install", str(config), "-o", str(path), "--json", *more]) == 0
    return path.read_text(), "\n".join(json.loads(capsys.readouterr().out)["warnings"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_it_runs_as_the_owner_of_its_config(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nobody = pwd.getpwnam("nobody")
    os.chown(config, nobody.pw_uid, nobody.pw_gid)
    text, warnings = installed(config, capsys)
    assert "User=nobody" in text and warnings == ""


def test_what_its_own_user_cannot_reach_is_told(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit, "owner_of", lambda _: None)
    config.parent.chmod(0o755)
    config.chmod(0o600)
    text, warnings = installed(config, capsys)
    assert "DynamicUser=yes" in text and "StateDirectory=%N" in text
    assert f"{config.parent}: the box's own user cannot write there" in warnings
    assert f"{config}: the box's own user cannot read it" in warnings
    assert installed(config, capsys, "--user", "camera")[1] == ""
    config.chmod(0o644)
    monkeypatch.setattr(unit, "STATE", config.parent.parent)
    assert installed(write_config(config.parent), capsys)[1] != "", "below another unit's folder"
    (config.parent.parent / "made").mkdir(exist_ok=True)
    results = [{"kind": "jsonl", "path": "../made/results.jsonl"}]
    assert installed(write_config(config.parent, sinks=results), capsys)[1] == ""


def test_variables_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    cameras = {"left": {"source": "rtsp://box:${GATE}@10.0.0.5/1"}}
    made, variables = write_config(tmp_path, cameras=cameras), tmp_path / "box.env"
    assert main(["service", "install", str(made), "-o", str(tmp_path / "unit")]) == 2
    assert "the environment has no GATE" in capsys.readouterr().err
    variables.write_text("# of the gate\nGATE='s3cret'\n")
    text, warnings = installed(made, capsys, "--environment", str(variables), "--user", "camera")
    assert f"EnvironmentFile={variables}\n" in text and "s3cret" not in text and warnings == ""
    monkeypatch.setenv("GATE", "s3cret")
    assert "a service has no GATE" in installed(made, capsys, "--user", "camera")[1]


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"device": "cpu"}, "PrivateDevices=yes"),
        ({"device": "auto"}, "SupplementaryGroups=video"),
        ({"device": "cpu", "cameras": {"left": {"source": 0}}}, "SupplementaryGroups=video"),
    ],
)
def test_it_sees_devices_only_where_it_may_need_them(tmp_path: Path, capsys, keys: dict, line: str) -> None:
    text, _ = installed(write_config(tmp_path, **keys), capsys)
    assert ("PrivateDevices=yes" in text) + ("SupplementaryGroups=video" in text) == 1 and line in text


def test_a_unit_of_somebody_else_is_kept(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gemel.service"
    path.write_text("[Unit]\n")
    assert main(["service", "install", str(config), "-o", str(path)]) == 2
    assert path.read_text() == "[Unit]\n" and "was not written by Gemel" in capsys.readouterr().err
    path.write_text(MARK)
    assert main(["service", "install", str(config), "-o", str(path)]) == 0


def test_a_name_that_would_be_another_line_of_the_unit_is_refused(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "a\nExecStartPre=id"
    folder.mkdir()
    assert main(["service", "install", str(write_config(folder)), "-o", str(tmp_path / "unit")]) == 2
    assert not (tmp_path / "unit").exists() and "cannot stand in a systemd unit" in capsys.readouterr().err


@pytest.mark.parametrize("user", ["a b", "x\nExecStartPre=id", "9lives"])
def test_what_is_no_user_is_refused(config: Path, tmp_path: Path, user: str) -> None:
    assert main(["service", "install", str(config), "-o", str(tmp_path / "unit"), "--user", user]) == 2
    assert not (tmp_path / "unit").exists()
