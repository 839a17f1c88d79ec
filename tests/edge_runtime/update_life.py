"""The life of a box with updates, for a recorder of file operations: `python -m tests.edge_runtime.update_life FOLDER`.

One update is installed and accepted, a second one installed and taken back. Marks say what has been done.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path

from gemel.edge_runtime.updates.updater import recover_update
from tests.edge_runtime.disk_states import MARK
from tests.edge_runtime.update_fixture import Fixture, make_bundle

NAMES = ("old", "new", "third")


def leave_mark(name: str) -> None:
    """Show a recorder where we are."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(MARK + name)


def start_box(puller: Fixture) -> None:
    """What the daemon does before the updater runs."""
    spool = puller.folder / "spool"
    recover_update(spool, puller.folder / "box.safetensors")
    spool.mkdir(exist_ok=True)
    puller.updater = puller.build()


def live(folder: Path) -> None:
    """Run the whole life; the bundles are left in `folder` of its parent by name."""
    puller = Fixture(folder)
    third = make_bundle(folder.parent, "third", 3, puller.private)
    for name, data in (("old", puller.old), ("new", puller.new)):
        (folder.parent / name).write_bytes(data)
    shutil.rmtree(folder / "spool")
    for name in ("old.safetensors", "new.safetensors"):
        (folder / name).unlink()
    leave_mark("install")
    start_box(puller)
    puller.server.files["/box.safetensors"] = puller.new
    puller.run(5)
    start_box(puller)
    leave_mark("accept")
    puller.run(120)
    leave_mark("install third")
    puller.server.files["/box.safetensors"] = third
    puller.updater._next_poll = 0.0
    puller.run(5)
    leave_mark("take back")
    puller.problems["gate"] = "cannot run"
    puller.run(5)
    leave_mark("end")


if __name__ == "__main__":
    live(Path(sys.argv[1]))
