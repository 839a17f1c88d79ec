"""Updates that a box pulls, from real servers: taken, refused, taken back, and whole at every moment."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from edge_runtime import update_sources, updates
from edge_runtime.config import UpdateConfig, load_config
from edge_runtime.daemon import run
from edge_runtime.reload import ReloadResult
from edge_runtime.updates import UpdateFolder, Updater, file_digest, recover_update
from models import io
from models.bundle import Made, write_bundle
from models.bundle.delta import write_update
from models.bundle.signing import sign_bundle
from models.errors import InputError
from tests.edge_runtime.local_box import LocalBox
from tests.edge_runtime.tiny import FACTORY, LOOPED, query, trained_looking, write_box, write_config
from tests.edge_runtime.update_server import UpdateServer

KILLS = 20


def make_keys(folder: Path) -> tuple[Path, Path]:
    key = Ed25519PrivateKey.generate()
    private, public = folder / "key", folder / "key.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    return private, public


def make_bundle(folder: Path, name: str, seed: int, key: Path | None) -> bytes:
    path = folder / name
    write_bundle(path, {"gate": trained_looking(seed)}, [query("gate", "left")], Made("tiny", "none", 0))
    if key is not None:
        sign_bundle(path, key)
    return path.read_bytes()


class Fixture:
    """A server, a folder with the present bundle, and an updater whose box is made of values."""

    def __init__(self, folder: Path, kind: str = "file") -> None:
        self.folder, self.server = folder, UpdateServer()
        self.private, self.public = make_keys(folder)
        self.old = make_bundle(folder, "old.safetensors", 1, self.private)
        self.new = make_bundle(folder, "new.safetensors", 2, self.private)
        (folder / "box.safetensors").write_bytes(self.old)
        (folder / "spool").mkdir()
        path = "/box.safetensors" if kind == "file" else "/D/controller/v1/box"
        self.config = UpdateConfig(kind, self.server.address + path, self.public, watch_s=100.0)
        self.now, self.reloads, self.reload_s = 1000.0, list[str | None](), 0.0
        self.answers, self.problems = list[str | None](), dict[str, str]()
        self.row: dict[str, Any] = {"query": "gate", "processed": 0, "late": 0, "failed": 0, "dropped": {}}
        self.files = UpdateFolder(folder / "spool", folder / "box.safetensors")
        self.updater = self.build()

    def build(self, **changes: Any) -> Updater:
        """An updater as after a start of the box."""
        self.files.prepare()
        updater = Updater(
            replace(self.config, **changes), self.files, self.reload, lambda: [self.row], lambda: self.problems,
            (FACTORY,), clock=lambda: self.now,
        )  # fmt: skip
        updater.state = self.files.read_state()
        return updater

    def reload(self) -> Future[ReloadResult]:
        self.reloads.append(self.present)
        self.now += self.reload_s
        future: Future[ReloadResult] = Future()
        future.set_result(ReloadResult(self.answers.pop(0) if self.answers else None))
        return future

    def run(self, seconds: int, processed: int = 50, **more: int) -> None:
        """So many seconds of the box, with these frames every five."""
        for _ in range(0, seconds, 5):
            self.row["processed"] += processed
            for key, value in more.items():
                self.row[key] += value
            self.now += 5.0
            self.updater.step()

    @property
    def present(self) -> str:
        """Which bundle the config names at present."""
        data = (self.folder / "box.safetensors").read_bytes()
        return "old" if data == self.old else "new" if data == self.new else "neither"


@pytest.fixture
def puller(tmp_path: Path) -> Fixture:
    return Fixture(tmp_path)


def test_update_is_taken_tried_and_accepted(puller: Fixture) -> None:
    puller.server.files["/box.safetensors"] = puller.old
    puller.run(60)
    assert puller.present == "old" and not puller.reloads and puller.updater.trouble is None
    puller.server.files["/box.safetensors"] = puller.new
    puller.updater._next_poll = 0.0
    puller.run(5)
    assert puller.present == "new" and puller.reloads == ["new"] and puller.updater.to_json()["trial"] is not None
    puller.run(120)
    assert puller.updater.state.trial is None and puller.present == "new" and len(puller.reloads) == 1
    asked = len(puller.server.asked)
    puller.updater.poll()
    assert puller.server.asked[asked:] == [("HEAD", "/box.safetensors")], "a known tag is not loaded again"
    puller.server.files["/box.safetensors"] = puller.old
    puller.updater.poll()
    assert "is older: it served before" in str(puller.updater.trouble) and puller.present == "new"


def test_update_comes_as_a_delta_where_one_is_offered(puller: Fixture, tmp_path: Path) -> None:
    write_update(tmp_path / "old.safetensors", tmp_path / "new.safetensors", tmp_path / "delta")
    digest = file_digest(tmp_path / "old.safetensors")
    puller.server.files["/box.safetensors"] = puller.new
    puller.server.files[f"/box.safetensors.from-{digest[:12]}"] = (tmp_path / "delta").read_bytes()
    puller.updater.poll()
    assert puller.present == "new" and ("GET", "/box.safetensors") not in puller.server.asked


@pytest.mark.parametrize(("more", "reason"), [({"failed": 40}, "of its frames fail"), ({"late": 40}, "in time")])
def test_update_is_taken_back_where_a_query_gets_worse(puller: Fixture, more: dict[str, int], reason: str) -> None:
    puller.server.files["/box.safetensors"] = puller.new
    puller.updater._next_poll = 1060.0
    puller.run(60)
    assert puller.present == "new"
    puller.run(10, **more)
    assert puller.present == "old" and puller.reloads == ["new", "old"] and puller.updater.state.trial is None
    (why,) = puller.updater.to_json()["refused"].values()
    assert reason in why
    restarted = puller.build()
    restarted.state.tag = None
    restarted.poll()
    assert "was taken back before" in str(restarted.trouble) and puller.present == "old"


def test_trial_counts_from_the_end_of_a_slow_reload_and_anew_after_a_restart(puller: Fixture) -> None:
    puller.server.files["/box.safetensors"] = puller.new
    puller.reload_s = 200.0
    puller.updater.poll()
    puller.run(5)
    assert puller.updater.state.trial is not None
    puller.updater, puller.now = puller.build(), puller.now + 3600.0
    puller.run(95)
    assert puller.updater.state.trial is not None
    puller.run(10)
    assert puller.updater.state.trial is None and puller.present == "new"


def test_update_is_taken_back_where_a_query_drifts(puller: Fixture) -> None:
    puller.server.files["/box.safetensors"] = puller.new
    puller.problems["other"] = "known before"
    puller.updater.poll()
    puller.run(20)
    assert puller.present == "new"
    puller.problems["gate"] = "the drift check finds it below its target"
    puller.run(5)
    assert puller.present == "old"


def test_update_that_the_box_refuses_is_taken_back(puller: Fixture) -> None:
    puller.server.files["/box.safetensors"] = puller.new
    puller.answers.append("query 'gate' has no camera")
    puller.updater.poll()
    assert puller.present == "old" and "no camera" in str(puller.updater.to_json()["refused"])


@pytest.mark.parametrize("fault", ["unsigned", "another key", "damaged", "cut", "stall", "nothing", "no file"])
def test_wrong_offer_changes_nothing(puller: Fixture, fault: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(update_sources, "TIMEOUT_S", 0.3)
    (other := tmp_path / "other").mkdir()
    offers = {
        "unsigned": lambda: make_bundle(other, "b", 3, None),
        "another key": lambda: make_bundle(other, "b", 3, make_keys(other)[0]),
        "damaged": lambda: puller.new[:-40] + bytes([puller.new[-40] ^ 1]) + puller.new[-39:],
        "nothing": lambda: b"",
        "no file": lambda: b"<html>not found</html>",
    }
    puller.server.files["/box.safetensors"] = offers.get(fault, lambda: puller.new)()
    puller.server.fault = fault if fault in ("cut", "stall") else ""
    puller.updater.poll()
    assert puller.present == "old" and not puller.reloads and puller.updater.trouble is not None
    puller.server.fault, puller.server.files["/box.safetensors"] = "", puller.new
    puller.updater.poll()
    assert puller.present == "new", "the next good offer is taken"


def test_hawkbit_deployment_is_taken_and_reported(tmp_path: Path) -> None:
    puller = Fixture(tmp_path, "hawkbit")
    puller.updater = puller.build(token="s3cret", watch_s=10.0)
    puller.server.offer_by_hawkbit("7", puller.new)
    puller.updater.poll()
    assert puller.present == "new" and puller.server.tokens == {"TargetToken s3cret"}
    puller.run(20)
    path, body = puller.server.posted[-1]
    assert path == "/D/controller/v1/box/deploymentBase/7/feedback"
    assert body["status"]["execution"] == "closed" and body["status"]["result"]["finished"] == "success"
    puller.updater.poll()
    assert puller.updater.trouble is None and len(puller.reloads) == 1
    puller.server.offer_by_hawkbit("8", make_bundle(tmp_path, "b", 3, None))
    puller.updater.poll()
    assert puller.server.posted[-1][1]["status"]["result"]["finished"] == "failure" and puller.present == "new"


@pytest.mark.parametrize(
    "wrong",
    [
        {"hashes": {"sha256": "0" * 64}},
        {"size": 1},
        {"_links": {"download": {"href": "http://evil.example/b"}}},
        {"_links": {"download": {"href": "file:///etc/passwd"}}},
        {"filename": "readme.txt"},
        {"hashes": {}},
        {"hashes": "none"},
    ],
    ids=str,
)
def test_hawkbit_that_lies_changes_nothing(tmp_path: Path, wrong: dict[str, Any]) -> None:
    puller = Fixture(tmp_path, "hawkbit")
    puller.server.offer_by_hawkbit("7", puller.new, **wrong)
    puller.updater.poll()
    assert puller.present == "old" and puller.updater.trouble is not None and not puller.reloads


def test_bundle_that_ends_the_box_is_taken_back_at_a_start(puller: Fixture) -> None:
    puller.server.files["/box.safetensors"] = puller.new
    puller.updater.poll()
    spool, bundle = puller.folder / "spool", puller.folder / "box.safetensors"
    assert [recover_update(spool, bundle) for _ in range(updates.MAX_STARTS)] == [False] * updates.MAX_STARTS
    assert recover_update(spool, bundle) and puller.present == "old" and not recover_update(spool, bundle)


def test_bundle_is_old_or_new_whenever_the_power_goes(puller: Fixture) -> None:
    """Killed at random lines of an update (`make faults` does so 200 times)."""
    kill_updates(puller, KILLS)


def kill_updates(puller: Fixture, times: int) -> int:
    """How often the new bundle was there; AssertionError where it was ever neither."""
    puller.server.files["/box.safetensors"] = puller.new
    lines = count_lines(puller.updater.poll)
    chance, new = random.Random(0), 0
    for _ in range(times):
        (puller.folder / "box.safetensors").write_bytes(puller.old)
        (puller.folder / "spool" / "updates" / "state.json").unlink(missing_ok=True)
        moment = chance.randrange(lines)
        child = os.fork()
        if not child:
            count_lines(puller.build().poll, moment)
            os._exit(0)
        os.waitpid(child, 0)
        assert puller.present in ("old", "new")
        recover_update(puller.folder / "spool", puller.folder / "box.safetensors")
        assert puller.present in ("old", "new")
        state = puller.build().state
        assert state.trial is None or puller.files.previous.read_bytes() == puller.old
        new += puller.present == "new"
        assert not [path for path in puller.folder.iterdir() if updates.TEMPORARY.fullmatch(path.name)]
    return new


def count_lines(function: Callable[[], object], last: int | None = None) -> int:
    """The lines of the updater, its sources and file operations that a call runs; it is killed before the `last`."""
    files, count = {updates.__file__, update_sources.__file__, io.__file__}, 0

    def trace(frame: FrameType, kind: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in files:
            return None
        if kind == "line":
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def test_running_box_pulls_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "TICK_S", 0.05)
    write_box(tmp_path)
    private, _ = make_keys(tmp_path)
    server = UpdateServer()
    keys = {"url": f"{server.address}/b", "public_key": "key.pub", "every_s": 1, "watch_s": 1}
    config = write_config(tmp_path, cameras=LOOPED, spool="spool", updates=keys)
    server.files["/b"] = make_bundle(tmp_path, "new.safetensors", 9, private)
    digest = file_digest(tmp_path / "new.safetensors")
    with LocalBox(config) as box:
        box.until(lambda: any(one["bundle"] == digest[:12] for one in box.records("gate")))
        box.until(lambda: box.service._updater is not None and box.service._updater.state.past)
    assert box.summary["fault"] is None and box.summary["balanced"]


def test_updates_need_a_public_key(tmp_path: Path) -> None:
    write_box(tmp_path)
    private, _ = make_keys(tmp_path)
    for name, problem in (("gone.pub", "cannot be read"), (private.name, "is no public key")):
        updates_keys = {"url": "http://u/b", "public_key": name}
        with pytest.raises(InputError, match=problem):
            run(write_config(tmp_path, spool="spool", updates=updates_keys), check=True)


def test_updates_need_a_spool(tmp_path: Path) -> None:
    write_box(tmp_path)
    config = write_config(tmp_path, updates={"url": "http://u/b", "public_key": "key.pub"})
    with pytest.raises(InputError, match=r"updates: .* there is none; add `spool"):
        load_config(config)
