"""What tests of updates have in common: keys, signed bundles, and an updater whose box is made of values."""

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

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from gemel.edge_runtime.life.config import UpdateConfig
from gemel.edge_runtime.life.reload import ReloadResult
from gemel.edge_runtime.updates import update_exchange, update_files, update_history, update_sources
from gemel.edge_runtime.updates import updater as updates
from gemel.edge_runtime.updates.update_files import UpdateFolder
from gemel.edge_runtime.updates.update_history import UpdateHistory
from gemel.edge_runtime.updates.updater import Updater, recover_update
from gemel.models.bundle import Made, write_bundle
from gemel.models.bundle.signing import sign_bundle
from gemel.models.files import io
from tests.edge_runtime.tiny import FACTORY, query, trained_looking
from tests.edge_runtime.update_server import UpdateServer

TRACED = {module.__file__ for module in (io, updates, update_exchange, update_files, update_history, update_sources)}


def make_keys(folder: Path) -> tuple[Path, Path]:
    key = Ed25519PrivateKey.generate()
    private, public = folder / "key", folder / "key.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    return private, public


def make_bundle(
    folder: Path, name: str, seed: int, key: Path | None, sequence: int | None = None, valid_until: int | None = None
) -> bytes:
    """A bundle of weights by a seed, signed with the seed as its number unless another is given."""
    path = folder / name
    write_bundle(
        path, {"gate": trained_looking(seed)}, [query("gate", "left")], Made("tiny", "none", 0), overwrite=True
    )
    if key is not None:
        sign_bundle(path, key, sequence or seed, valid_until)
    return path.read_bytes()


class Fixture:
    """A server, a folder with the present bundle, and an updater whose box is made of values."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.server = folder, UpdateServer()
        self.private, self.public = make_keys(folder)
        self.old = make_bundle(folder, "old.safetensors", 1, self.private)
        self.new = make_bundle(folder, "new.safetensors", 2, self.private)
        (folder / "box.safetensors").write_bytes(self.old)
        (folder / "spool").mkdir()
        self.config = UpdateConfig(f"{self.server.address}/box.safetensors", self.public, watch_s=100.0)
        self.now, self.reloads, self.reload_s = 1000.0, list[str | None](), 0.0
        self.answers, self.problems = list[str | None](), dict[str, str]()
        self.row: dict[str, Any] = {"query": "gate", "processed": 0, "late": 0, "failed": 0, "dropped": {}}
        self.files = UpdateFolder(folder / "spool", folder / "box.safetensors")
        self.updater = self.build()

    def build(self, **changes: Any) -> Updater:
        """An updater as after a start of the box."""
        updater = Updater(
            replace(self.config, **changes), self.files, self.reload, lambda: [self.row], lambda: self.problems,
            (FACTORY,), clock=lambda: self.now,
        )  # fmt: skip
        updater.open()
        return updater

    @property
    def history(self) -> UpdateHistory:
        """What is remembered on the disk."""
        return update_history.read_history(self.files.history)

    def offer(self, name: str, seed: int, **more: int) -> bytes:
        """Put a new signed bundle on the server, and let the next poll look at it."""
        data = make_bundle(self.folder, f"{name}.safetensors", seed, self.private, **more)
        self.server.files["/box.safetensors"] = data
        return data

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


def kill_updates(puller: Fixture, times: int) -> int:
    """How often the new bundle was there; AssertionError where it was ever neither."""
    puller.server.files["/box.safetensors"] = puller.new
    lines = count_lines(puller.updater.poll)
    chance, new = random.Random(0), 0
    for _ in range(times):
        (puller.folder / "box.safetensors").write_bytes(puller.old)
        puller.files.history.unlink(missing_ok=True)
        puller.files.memory.unlink(missing_ok=True)
        moment = chance.randrange(lines)
        child = os.fork()
        if not child:
            count_lines(puller.build().poll, moment)
            os._exit(0)
        os.waitpid(child, 0)
        assert puller.present in ("old", "new")
        recover_update(puller.folder / "spool", puller.folder / "box.safetensors")
        assert puller.present in ("old", "new")
        trial = puller.history.trial
        assert trial is None or puller.files.previous.read_bytes() == puller.old
        assert trial is not None or puller.present == "old", "the new bundle is watched"
        new += puller.present == "new"
        puller.build()
        assert not list(puller.files.folder.glob(update_files.TEMPORARIES))
    puller.files.history.unlink()
    puller.files.memory.unlink(missing_ok=True)
    (puller.folder / "box.safetensors").write_bytes(puller.old)
    puller.build().poll()
    assert not list(puller.folder.glob(update_files.TEMPORARIES)), "the next install removes what a kill has left"
    return new


def kill_rollbacks(puller: Fixture, times: int) -> int:
    """How often the old bundle served again; AssertionError where neither did, or the history was lost."""
    puller.server.files["/box.safetensors"] = puller.new
    puller.updater.poll()
    puller.run(120)
    files, bundle, chance, old = puller.files, puller.folder / "box.safetensors", random.Random(0), 0
    kept = {path: path.read_bytes() for path in (files.previous, files.history, files.memory)}

    def roll_back() -> None:
        updater = puller.build()
        updater.roll_back()
        updater._next_poll = puller.now + 100
        updater.step()

    def restore() -> None:
        bundle.write_bytes(puller.new)
        for path, data in kept.items():
            path.write_bytes(data)

    lines = count_lines(roll_back)
    for _ in range(times):
        restore()
        moment = chance.randrange(lines)
        child = os.fork()
        if not child:
            count_lines(roll_back, moment)
            os._exit(0)
        os.waitpid(child, 0)
        begun = puller.history.trial is not None or bool(puller.history.refused)
        recover_update(puller.folder / "spool", bundle)
        assert puller.present == ("old" if begun else "new") and puller.history.trial is None
        old += begun
    restore()
    return old


def count_lines(function: Callable[[], object], last: int | None = None) -> int:
    """The lines of the updater, its sources and file operations that a call runs; it is killed before the `last`."""
    count = 0

    def trace(frame: FrameType, kind: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in TRACED:
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
