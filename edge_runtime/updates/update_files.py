"""The files of an update: the bundle of the config, what the updater keeps in the spool, and how much room there is.

Each file is replaced by a rename after its bytes are on the disk, and each folder is written to the disk after a rename
in it, before the next step: at any moment, also after a power cut, the bundle is the old or the new one, whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from gemel.edge_runtime.life.config import FOLDER_MODE
from gemel.models.errors import InputError, size_text
from gemel.models.files.io import check_output, describe_problem, open_atomic

FOLDER = "updates"
HISTORY_FILE, MEMORY_FILE = "history.json", "server.json"
OFFER_FILE, PREVIOUS_FILE = "offer.safetensors", "previous.safetensors"
COPY_BYTES = 1 << 20
MAX_BUNDLE_BYTES, MAX_GROWTH = 16 * 2**30, 4
"""An update is at most so many times as large as the bundle that serves."""
RESERVE_BYTES = 64 << 20
"""What an update leaves free on each disk."""
TEMPORARIES = ".*.tmp"
_ROOM_HINT = "free some space"


@dataclass(frozen=True, slots=True)
class SizeLimit:
    """The most bytes that an offer may have, and what bounds it, as part of a sentence."""

    nbytes: int
    reason: str


class UpdateFolder:
    """The updater's files in the spool, and the bundle of the config."""

    def __init__(self, spool: Path, bundle: Path) -> None:
        self.folder, self.bundle = spool / FOLDER, bundle

    @property
    def offer(self) -> Path:
        """Where an offer is downloaded."""
        return self.folder / OFFER_FILE

    @property
    def previous(self) -> Path:
        """The bundle before the one on trial."""
        return self.folder / PREVIOUS_FILE

    @property
    def history(self) -> Path:
        """What the box has taken and taken back."""
        return self.folder / HISTORY_FILE

    @property
    def memory(self) -> Path:
        """What the server said."""
        return self.folder / MEMORY_FILE

    def prepare(self) -> None:
        """Make the folder, on the disk with all that lead to it, and remove what a kill has left half written there.

        InputError where it cannot be made; what cannot be removed stays. Beside the bundle others may write: what a
        kill has left of our own there is removed by the next install.
        """
        with describe_problem(self.folder):
            self.folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
        sync_folder(self.folder.parent)
        sync_folder(self.folder.parent.parent)
        with contextlib.suppress(OSError):
            for path in self.folder.glob(TEMPORARIES):
                _remove(path)

    def check_writable(self) -> None:
        """InputError where the bundle could not be replaced."""
        check_replaceable(self.bundle)

    def find_limit(self) -> SizeLimit:
        """The most bytes that an offer may have: by the bundle that serves, and by the room on the disks.

        There must be room for the offer, for a copy of the bundle that serves, and for the new one beside it.
        """
        with describe_problem(self.bundle):
            present_bytes = self.bundle.stat().st_size
            spool_bytes, bundle_bytes = (_free_bytes(path) for path in (self.folder, self.bundle.parent))
            is_one_disk = self.folder.stat().st_dev == self.bundle.parent.stat().st_dev
        spool_room = (spool_bytes - RESERVE_BYTES - present_bytes) // (2 if is_one_disk else 1)
        room = max(0, min(spool_room, bundle_bytes - RESERVE_BYTES))
        limits = [
            SizeLimit(room, "there is room for"),
            SizeLimit(MAX_GROWTH * present_bytes, f"{MAX_GROWTH} times the present bundle has"),
            SizeLimit(MAX_BUNDLE_BYTES, "an update may have"),
        ]
        return min(limits, key=lambda limit: limit.nbytes)

    def keep_previous(self) -> None:
        """Copy the bundle that serves to the spool; it is on the disk afterwards."""
        _copy(self.bundle, self.previous)

    def install(self, source: Path) -> None:
        """Replace the bundle by a copy of a file, whole or not at all. InputError where it cannot be."""
        _copy(source, self.bundle)

    def remove_offer(self) -> None:
        """Remove what was downloaded, if it is there."""
        _remove(self.offer)


def _copy(source: Path, target: Path) -> None:
    with describe_problem(target), open(source, "rb") as data, open_atomic(target, overwrite=True) as file:
        while piece := data.read(COPY_BYTES):
            file.write(piece)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def check_replaceable(bundle: Path) -> None:
    """InputError where the folder of a bundle cannot be written, so that no update can replace it."""
    try:
        check_output(bundle, overwrite=True)
    except InputError as error:
        hint = "put the bundle in a folder that the box can write, such as /data of a container"
        raise InputError(bundle, f"no update can replace it: {error.problem}", hint) from error


def check_size(where: str, nbytes: int, limit: SizeLimit) -> None:
    """InputError where an offer of `where` has more bytes than it may have."""
    if nbytes > limit.nbytes:
        problem = f"offers {size_text(nbytes)} or more; {limit.reason} {size_text(max(0, limit.nbytes))}"
        raise InputError(where, problem, _ROOM_HINT if limit.reason.startswith("there") else "install it by hand")


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk; some file systems refuse that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    digest = hashlib.sha256()
    with describe_problem(path), open(path, "rb") as file:
        while piece := file.read(COPY_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
