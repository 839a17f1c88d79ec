"""A power loss at any moment of an update: every legal state of the disk is opened by the box's start."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemel.edge_runtime.sinks.base import ResultMessage
from gemel.edge_runtime.sinks.jsonl import JsonLines
from gemel.edge_runtime.updates.update_files import UpdateFolder, file_digest
from gemel.edge_runtime.updates.update_history import read_history
from gemel.edge_runtime.updates.updater import recover_update
from tests.edge_runtime.disk_states import DiskState, Operation, Recording, Sync, disk_states, record, write_tree
from tests.edge_runtime.update_life import NAMES

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
MARKS = ["install", "accept", "install third", "take back", "end"]


class Life:
    """A recorded life of a box with updates, and its bundles by the digest."""

    def __init__(self, folder: Path) -> None:
        box = folder / "box"
        box.mkdir()
        command = [sys.executable, "-m", "tests.edge_runtime.update_life", str(box)]
        recording = Recording(box, record(command, folder / "calls"))
        self.operations, self.folders = recording.operations, recording.folders
        self.digests = {name: file_digest(folder / name) for name in NAMES}
        self.names = {digest: name for name, digest in self.digests.items()}

    def states(self, operations: list[Operation]) -> Iterator[DiskState]:
        return disk_states(operations, self.folders, "install")

    def find_fault(self, state: DiskState, folder: Path) -> str | None:
        """What is wrong after a start from a state; None where all is well."""
        write_tree(state.tree, folder)
        spool, bundle = folder / "spool", folder / "box.safetensors"
        if not bundle.exists():
            return "the bundle is gone"
        if file_digest(bundle) not in self.names:
            return "the bundle is torn"
        recover_update(spool, bundle)
        files = UpdateFolder(spool, bundle)
        history, serving = read_history(files.history), self.names[file_digest(bundle)]  # raises where it is torn
        trial = None if history.trial is None else self.names[history.trial.digest]
        moment = MARKS.index(state.mark)
        if serving not in (("old", "new"), ("new",), ("new", "third"), ("new", "third"), ("new",))[moment]:
            return f"{serving} serves"
        is_accepted = moment > 0 and history.highest >= 2
        if trial != serving and serving != "old" and not (serving == "new" and is_accepted):
            return f"{serving} serves and is not watched"
        if trial is not None and (
            not files.previous.exists() or file_digest(files.previous) != history.trial.previous  # type: ignore[union-attr]
        ):
            return "the bundle before the trial is gone"
        if (moment == 4 or (moment == 3 and serving == "new")) and self.digests["third"] not in history.refused:
            return "what was taken back is forgotten"
        return None


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    return Life(tmp_path_factory.mktemp("life"))


@needs_strace
def test_bundle_is_whole_and_watched_in_every_state_after_a_power_loss(life: Life, tmp_path: Path) -> None:
    faults: Counter[str] = Counter()
    count = 0
    for state in life.states(life.operations):
        count += 1
        if (fault := life.find_fault(state, tmp_path / "disk")) is not None:
            faults[f"{state.mark}: {fault}"] += 1
    assert not faults and count > 100, (count, faults)


@needs_strace
@pytest.mark.parametrize("kind", ["files", "folders"])
def test_power_loss_without_syncs_is_found_to_hurt(life: Life, kind: str, tmp_path: Path) -> None:
    """The check can fail: the same life as if the syncs of files, or of folders, had not been made."""

    def is_there(operation: Operation) -> bool:
        return not isinstance(operation, Sync) or (operation.inode in life.folders) != (kind == "folders")

    operations = [operation for operation in life.operations if is_there(operation)]
    for state in life.states(operations):
        try:
            if life.find_fault(state, tmp_path / "disk") is not None:
                return
        except Exception:  # a torn history
            return
    raise AssertionError("no state hurts")


@pytest.mark.parametrize("loose", ["absent", "zero", "hole"])
def test_jsonl_file_after_a_power_loss_holds_whole_records_alone(tmp_path: Path, loose: str) -> None:
    """Its lines are handed to the system one by one, and synced by the system alone: any end of it may be lost."""
    records = [ResultMessage({"frame": number, "label": "x" * (number % 7)}) for number in range(12)]
    written, path = tmp_path / "written", tmp_path / "results.jsonl"
    append_records(written, records)
    data = written.read_bytes()
    for cut in range(len(data) + 1):
        hole = min(len(data), cut + 40)
        left = {"absent": b"", "zero": bytes(len(data) - cut), "hole": bytes(hole - cut) + data[hole:]}[loose]
        path.write_bytes(data[:cut] + left)
        append_records(path, records[:1])
        lines = path.read_bytes().splitlines(keepends=True)
        assert b"".join(lines[:-1]) == data[: len(b"".join(lines[:-1]))], "a prefix of what was delivered"
        assert json.loads(lines[-1]) == records[0].record
        assert len(lines) - 1 in (data[:cut].count(b"\n"), data[: cut + 1].count(b"\n")), "no whole record is lost"


def append_records(path: Path, records: list[ResultMessage]) -> None:
    """Deliver records to a file as a box does after its start."""
    sink = JsonLines(path)
    sink.open()
    sink.write(records)
    sink.close()


def test_jsonl_start_on_a_file_of_another_kind_loses_nothing(tmp_path: Path) -> None:
    path, data = tmp_path / "clip.mp4", b"\0\0\0\x18ftyp\nmore\0\0"
    path.write_bytes(data)
    append_records(path, [ResultMessage({"frame": 1})])
    assert path.read_bytes() == data + b'\n{"frame":1}\n'
