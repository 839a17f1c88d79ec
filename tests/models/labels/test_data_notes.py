"""One note for whatever in a query's pictures is left out, converted, counted twice or used in part."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image, ImageCms

from gemel.models.data import PreparedFrames, load_split
from gemel.models.errors import InputError
from gemel.models.files.pictures import decode_picture, read_picture
from gemel.models.notes import collect_notes
from gemel.models.preprocess import Preprocess
from tests.models.queries import make_query

RNG = np.random.default_rng(7)


def write_picture(path: Path, width: int = 32, height: int = 24) -> Path:
    """A picture of noise, so that no two are equal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(RNG.integers(0, 256, (height, width, 3), np.uint8)).save(path)
    return path


def write_splits(folder: Path, count: int = 4) -> Path:
    """Two classes in three splits, all pictures different."""
    for split in ("train", "val", "test"):
        for index in range(count):
            write_picture(folder / split / ("busy" if index % 2 else "empty") / f"{split}__{index:04}.png")
    return folder


def notes_of(folder: Path, split: str = "test", **keys: Any) -> list[str]:
    """The notes of loading a split and decoding all of it, without the folder."""
    query = make_query(data=folder, **keys)
    with collect_notes() as notes:
        PreparedFrames(query, load_split(query, split)).load()
    return [note.replace(str(folder), "DATA") for note in notes]


def test_load_split_of_ordinary_pictures_has_no_notes(tmp_path: Path) -> None:
    assert notes_of(write_splits(tmp_path)) == []


def copy_to(folder: Path, source: str, target: str) -> None:
    (folder / target).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / source, folder / target)


UNREAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "files of a class that are no pictures": (
        lambda d: [(d / "test/busy" / name).write_text("x") for name in ("a.webp", "a.txt", "b.txt", "c.gif")],
        "DATA/test/busy: 4 of 6 entries are no .jpg or .png and are left out: a.txt, a.webp, b.txt and 1 more; save",
    ),
    "folders and pictures beside the classes": (
        lambda d: [write_picture(d / "test" / name) for name in ("van/a.png", "loose.jpg", "car/b.png")],
        "DATA/test: is read only in empty, busy; left out: car/, loose.jpg, van/; if they are classes of query gate",
    ),
    "folders beside the splits": (
        lambda d: write_picture(d / "validation/busy/a.png"),
        "DATA: is read only in train, val, test; left out: validation/; put their frames in a split",
    ),
    "names without unit and time": (
        lambda d: write_picture(d / "test/busy/latest.png"),
        "DATA/test: 1 of 5 file names are not <unit>__<milliseconds>; all count as ten blocks",
    ),
    "a picture of train": (
        lambda d: copy_to(d, "train/busy/train__0001.png", "test/busy/test__0009.png"),
        "DATA/test: 1 of 5 pictures of test are also in an earlier split, byte for byte: scores on them prove",
    ),
    "a picture with two labels": (
        lambda d: copy_to(d, "test/busy/test__0001.png", "test/empty/test__0008.png"),
        "DATA/test: 2 of 5 pictures are there with other labels too, byte for byte; take those",
    ),
    "a picture twice": (
        lambda d: copy_to(d, "test/busy/test__0001.png", "test/busy/test__0008.png"),
        "DATA/test: 1 of 5 pictures are copies of others and count again; remove the copies",
    ),
    "a picture of another shape": (
        lambda d: write_picture(d / "test/busy/test__0008.png", 96, 24),
        "DATA: frames from 32 x 24 to 96 x 24 pixels are all squashed to the network's input, 32 x 32; cut them to",
    ),
}  # fmt: skip


def test_load_split_notes_copies_among_annotated_pictures(tmp_path: Path) -> None:
    for split in ("train", "test"):
        names = [write_picture(tmp_path / split / "images" / f"{split}__000{index}.png").name for index in range(4)]
        copy_to(tmp_path, f"{split}/images/{names[2]}", f"{split}/images/{names[3]}")
        document = {
            "images": [{"id": index, "file_name": name} for index, name in enumerate(names)],
            "categories": [{"id": 1, "name": "car"}],
            "annotations": [{"image_id": 2, "category_id": 1, "bbox": [1, 2, 10, 5]}],
        }
        (tmp_path / split / "annotations.json").write_text(json.dumps(document))
    copy_to(tmp_path, "train/images/train__0000.png", "test/images/test__0001.png")
    (tmp_path / "test/masks").mkdir()
    assert notes_of(tmp_path, task="detection", classes=("car",)) == [
        "DATA/test: is read only in images, annotations.json; left out: masks/; "
        "put pictures in images, boxes in annotations.json",
        "DATA/test: 2 of 4 pictures are there with other labels too, byte for byte; "
        "take those with the wrong label out",
        "DATA/test: 1 of 4 pictures of test are also in an earlier split, byte for byte: "
        "scores on them prove nothing; give splits of different clips, or of times far apart",
    ]


@pytest.mark.parametrize("case", UNREAD)
def test_load_split_notes_what_it_does_not_use_as_it_lies(tmp_path: Path, case: str) -> None:
    change, expected = UNREAD[case]
    change(write_splits(tmp_path))
    (note,) = notes_of(tmp_path)
    assert note.startswith(expected) and "; " in note


def test_frames_of_several_shapes_are_one_note_whatever_splits_and_inputs(tmp_path: Path) -> None:
    write_splits(tmp_path)
    for width, split in ((96, "train"), (64, "val"), (80, "test")):
        write_picture(tmp_path / split / "busy" / f"{split}__0008.png", width, 24)
    queries = [make_query(data=tmp_path, input_size=side) for side in (32, 48)]
    with collect_notes() as notes:
        for query in queries:
            for split in ("train", "val", "test"):
                PreparedFrames(query, load_split(query, split)).load()
    (note,) = notes
    assert "frames from 32 x 24 to 96 x 24 pixels are all squashed to the network's input, 32 x 32" in note


def test_frames_of_several_shapes_that_are_not_stretched_are_no_note(tmp_path: Path) -> None:
    write_picture(write_splits(tmp_path) / "test/busy/test__0008.png", 96, 24)
    assert notes_of(tmp_path, preprocess=Preprocess((32, 32), resize="letterbox")) == []


def test_load_split_of_a_class_in_another_format_says_what_is_there(tmp_path: Path) -> None:
    for path in list((write_splits(tmp_path) / "test/busy").iterdir()):
        path.rename(path.with_suffix(".webp"))
    with collect_notes() as notes, pytest.raises(InputError, match="no frames of class 'busy'"):
        load_split(make_query(data=tmp_path), "test")
    assert any("2 of 2 entries are no .jpg or .png" in note for note in notes)


def test_load_split_notes_files_left_out_of_a_folder_of_frames(tmp_path: Path) -> None:
    for index in range(10):
        write_picture(tmp_path / f"clip__{index:04}.png")
    (tmp_path / "more.webp").write_text("x")
    (note,) = notes_of(tmp_path)
    assert note.startswith("DATA: 1 of 11 entries are no .jpg or .png and are left out: more.webp;")


def encode(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    made = io.BytesIO()
    image = Image.fromarray(RNG.integers(0, 200, (24, 32, 3), np.uint8)).convert(mode)
    if mode == "RGBA":
        image.putalpha(100)
    image.save(made, kind, **options)
    return made.getvalue()


def encode_16_bits(channels: int) -> bytes:
    return cv2.imencode(".png", RNG.integers(0, 2**16, (24, 32, channels), np.uint16))[1].tobytes()


def orientation(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x112] = value
    return exif


SECOND = {"save_all": True, "append_images": [Image.new("RGB", (32, 24))]}


def profile(space: Any) -> bytes:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile(space)).tobytes()


CONVERTED = {
    "16 bits of grey": (encode_16_bits(1), "hold 16 bits, reduced to 8"),
    "16 bits of colour": (encode_16_bits(3), "hold 16 bits, reduced to 8"),
    "transparent": (encode("PNG", "RGBA"), "have transparent parts, used as if opaque"),
    "transparent by palette": (
        encode("PNG", "P", transparency=bytes(256)),
        "have transparent parts, used as if opaque",
    ),
    "CMYK": (encode("JPEG", "CMYK"), "hold CMYK, converted to RGB"),
    "of another colour space": (
        encode("JPEG", icc_profile=profile("XYZ")),
        "hold the colour profile 'XYZ identity built-in', which is not applied",
    ),
    "animated PNG": (encode("PNG", **SECOND), "hold several frames, of which the first is used"),
    "MPO of a phone": (encode("MPO", **SECOND), "hold several frames, of which the first is used"),
    "upside down": (encode("JPEG", exif=orientation(3)), "are turned or mirrored as their EXIF tag says"),
}


@pytest.mark.parametrize("case", CONVERTED)
def test_read_picture_notes_a_conversion_once_for_a_data_folder(tmp_path: Path, case: str) -> None:
    data, expected = CONVERTED[case]
    write_splits(tmp_path)
    for index in range(3):
        (tmp_path / f"test/busy/test__009{index}.png").write_bytes(data)
        (tmp_path / f"test/empty/test__009{index}.png").write_bytes(data)
    (*_, note) = [note for note in notes_of(tmp_path) if "copies" not in note]
    start, _, rest = note.partition(".png ")
    assert (
        re.match("DATA: pictures such as test/(busy|empty)/test__009", start)
        and rest.startswith(expected)
        and ";" in rest
    )


FLAT = "dev/gate", "dev/yard", "dev"
"""Folders of pictures below one that is named as a split may be, without another split beside it."""


def test_folders_without_splits_have_notes_of_their_own(tmp_path: Path) -> None:
    with collect_notes() as notes:
        for folder in FLAT:
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / "frame.jpg").write_bytes(encode("JPEG", "CMYK"))
            read_picture(tmp_path / folder / "frame.jpg")
    assert [note.partition(": ")[0] for note in notes] == [str(tmp_path / one) for one in FLAT]


def test_decode_picture_of_a_camera_notes_no_file() -> None:
    with collect_notes() as notes:
        decode_picture(encode_16_bits(1), Path())
    assert notes[0].startswith("a camera: its pictures hold 16 bits, reduced to 8 (values / 256);")


@pytest.mark.parametrize(
    "data",
    [
        encode("PNG", "P"),
        encode("JPEG", "L"),
        encode("JPEG", exif=orientation(1)),
        encode("PNG", icc_profile=profile("sRGB")),
        encode("JPEG", icc_profile=b"no profile"),
    ],
    ids=["palette", "grey", "upright", "sRGB", "damaged profile"],
)  # fmt: skip
def test_read_picture_of_8_bits_has_no_notes(tmp_path: Path, data: bytes) -> None:
    (write_splits(tmp_path) / "test/busy/test__0099.png").write_bytes(data)
    assert notes_of(tmp_path) == []


def test_load_split_notes_a_roi_cut_at_the_edge_of_the_frames(tmp_path: Path) -> None:
    for index in range(10):
        write_picture(tmp_path / f"clip__{index:04}.png")
    assert notes_of(tmp_path, roi=(0.0, 0.0, 32.0, 24.0)) == []
    (note,) = notes_of(tmp_path, roi=(8.0, 0.0, 40.0, 24.0))
    assert note.startswith("query gate: its roi [8, 0, 40, 24] reaches beyond frames of 32 x 24 pixels and is cut")


def test_load_split_notes_labelled_frames_of_another_shape_than_the_roi(tmp_path: Path) -> None:
    write_splits(tmp_path)
    assert notes_of(tmp_path, roi=(100.0, 100.0, 164.0, 148.0)) == [], "cut out and scaled to half"
    (note,) = notes_of(tmp_path, roi=(100.0, 100.0, 200.0, 200.0))
    assert note.startswith(
        "DATA: labelled frames of 32 x 24 pixels are used whole, the roi of query gate is 100 x 100;"
    )


@pytest.mark.parametrize("name", ["export.zip", "export.tar.gz"])
def test_load_split_calls_an_archive_an_archive(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"PK\x03\x04 and more" if name.endswith("zip") else b"\x1f\x8b")
    with pytest.raises(InputError, match="is an archive, no video; unpack it, and give the folder"):
        load_split(make_query(data=path), "test")


@pytest.mark.parametrize("name", ["train.json", "annotations.xml", "train.txt", "one.jpg"])
def test_load_split_of_a_file_of_labels_asks_for_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(InputError, match="is no video; give the folder that holds it with its pictures and labels"):
        load_split(make_query(data=tmp_path / name), "test")


def test_load_split_of_a_folder_of_clips_says_what_to_name(tmp_path: Path) -> None:
    (tmp_path / "monday.mp4").write_bytes(b"")
    with pytest.raises(
        InputError, match=r"holds clips, as monday.mp4, and no frames .* name one clip in `data`, and all"
    ):
        load_split(make_query(data=tmp_path), "test")
