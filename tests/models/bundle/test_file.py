"""The file of an open bundle: after a change nothing of it is read."""

from __future__ import annotations

import os

import pytest

from models.bundle.format import is_open_as, open_file


def test_read_of_a_proven_file_fails_after_a_change(tmp_path):
    path = tmp_path / "b"
    path.write_bytes(b"0123456789")
    file = open_file(path, "")
    file.proven = file.opened_as
    room = bytearray(4)
    file.read(3, memoryview(room))
    assert room == b"3456" and is_open_as(file)
    with path.open("r+b") as other:
        other.write(b"zz")
    os.utime(path, ns=(0, file.opened_as.mtime_ns + 1))
    with pytest.raises(OSError, match="changed in place"):
        file.read(3, memoryview(room))
    file.proven = None
    file.read(0, memoryview(room))
    assert room == b"zz23" and not is_open_as(file)
    os.truncate(path, 2)
    with pytest.raises(OSError, match="has become shorter"):
        file.read(0, memoryview(room))


def test_read_of_a_replaced_file_gives_the_old_bytes(tmp_path):
    path = tmp_path / "b"
    path.write_bytes(b"0123456789")
    file = open_file(path, "")
    file.proven = file.opened_as
    (tmp_path / "other").write_bytes(b"zzzzzzzzzz")
    os.replace(tmp_path / "other", path)
    room = bytearray(4)
    file.read(0, memoryview(room))
    assert room == b"0123" and not is_open_as(file)
    descriptor = file.descriptor
    del file
    with pytest.raises(OSError):
        os.fstat(descriptor)
