"""Folders of pictures: which files count."""

from __future__ import annotations

import numpy as np
from PIL import Image

from gemel.models.files.pictures import list_pictures
from gemel.models.notes import collect_notes


def test_list_pictures_leaves_out_hidden_files_with_a_note(tmp_path):
    for name in ("2.png", "10.JPG"):
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / name)
    for name in ("._2.png", "._10.JPG", ".cache.jpg", ".DS_Store", "Thumbs.db"):
        (tmp_path / name).write_bytes(b"\0\5\x16\7" + bytes(4000))
    with collect_notes() as notes:
        assert [path.name for path in list_pictures(tmp_path)] == ["2.png", "10.JPG"]
    text = "3 of 5 files have a dot first and are left out; rename them if they are pictures"
    assert notes == [f"{tmp_path}: {text}"]
    with collect_notes() as notes:
        assert list_pictures(tmp_path / "none") == []
    assert not notes
