"""Splits that are not apart are no evidence: frames of one clip dealt out, versions and copies of one picture."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gemel.models.data import load_split
from gemel.models.labels.split_overlap import OVERLAP
from gemel.models.measures.evaluation import find_gap
from gemel.models.notes import collect_notes
from gemel.models.workload import load_workload
from tests.merger.tiny import write_workload
from tests.models.queries import make_query

COUNT = 60


def identify(index: int) -> str:
    """A name that says nothing of the order."""
    return hashlib.md5(str(index).encode()).hexdigest()


def walk(count: int = COUNT) -> Iterator[np.ndarray]:
    """A clip in which a bright square moves over a pattern."""
    rng = np.random.default_rng(1)
    place = np.array([20.0, 20.0])
    pattern = rng.integers(60, 120, (64, 64, 3), np.uint8)
    for _ in range(count):
        place = np.clip(place + rng.normal(0, 1.5, 2), 0, 44)
        frame = pattern.copy()
        x, y = place.astype(int)
        frame[y : y + 20, x : x + 20] = 250
        yield frame + rng.integers(0, 4, frame.shape, np.uint8)


def photographs(count: int = COUNT) -> Iterator[np.ndarray]:
    """Pictures that have nothing in common."""
    rng = np.random.default_rng(2)
    for _ in range(count):
        yield np.kron(rng.integers(0, 256, (8, 8, 3), np.uint8), np.ones((8, 8, 1), np.uint8))


def still(count: int = COUNT) -> Iterator[np.ndarray]:
    """A scene in which nothing happens, with the noise of a camera."""
    rng = np.random.default_rng(3)
    pattern = rng.integers(60, 120, (64, 64, 3))
    for _ in range(count):
        yield (pattern + rng.normal(0, 2, (64, 64, 3))).astype(np.uint8)


def deal(folder: Path, frames: Iterator[np.ndarray], name_of: Callable[[int], str], in_order: bool = False) -> None:
    """Write the frames to train, val and test, at random or in order."""
    order = np.arange(COUNT) if in_order else np.random.default_rng(4).permutation(COUNT)
    ranks = np.argsort(order)
    for index, frame in enumerate(frames):
        split = ("train", "train", "train", "val", "test")[ranks[index] * 5 // COUNT]
        path = folder / split / ("empty", "busy")[index // 3 % 2] / name_of(index)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(frame).save(path)


def overlap_of(folder: Path, split: str = "test") -> str:
    with collect_notes() as notes:
        loaded = load_split(make_query(data=folder), split)
    assert bool(loaded.overlap) == any("prove nothing" in note for note in notes)
    assert loaded.labels is not None
    assert not loaded.overlap or find_gap(make_query(data=folder), loaded, loaded.labels) == loaded.overlap
    return loaded.overlap


NAMES: dict[str, Callable[[int], str]] = {
    "clip and time": lambda n: f"gate__{200 * n:06}.png",
    "numbers": lambda n: f"frame_{n:05}.png",
    "numbers of a video": lambda n: f"yard_mp4-{n}_jpg.rf.{n * 7919 % 65536:032x}.png",
    "number before a camera": lambda n: f"{n:05}_cam3.png",
    "date and time": lambda n: f"2025-06-01_10-{n // 30:02}-{n % 30 * 2:02}.png",
    "identifier before a number": lambda n: f"{identify(n)[:8]}-frame_{n:05}.png",
    "two clips": lambda n: f"{'ab'[n * 2 // COUNT]}__{200 * n}.png",
}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("split", ["val", "test"])
def test_frames_of_one_clip_dealt_to_all_splits_are_no_evidence(tmp_path: Path, kind: str, split: str) -> None:
    deal(tmp_path, walk(), NAMES[kind])
    assert f"pictures of {split} lie between frames of an earlier split in one clip" in overlap_of(tmp_path, split)


@pytest.mark.parametrize("kind", NAMES)
def test_frames_cut_in_time_are_apart(tmp_path: Path, kind: str) -> None:
    deal(tmp_path, walk(), NAMES[kind], in_order=True)
    assert overlap_of(tmp_path) == ""


def test_frames_of_a_clip_named_by_their_hashes_are_told_by_their_pixels(tmp_path: Path) -> None:
    deal(tmp_path / "dealt", walk(), lambda n: f"{identify(n)}.jpg")
    assert "pictures of test look as pictures of an earlier split do" in overlap_of(tmp_path / "dealt")
    deal(tmp_path / "in time", walk(), lambda n: f"{identify(n)}.jpg", in_order=True)
    assert overlap_of(tmp_path / "in time") == ""


@pytest.mark.parametrize("change", [lambda pixels: pixels[:, ::-1], np.rot90])
def test_augmented_copies_of_photographs_are_no_evidence(
    tmp_path: Path, change: Callable[[np.ndarray], np.ndarray]
) -> None:
    deal(tmp_path, photographs(), lambda n: f"{identify(n)}.png")
    for path in sorted((tmp_path / "train").rglob("*.png"))[:4]:
        Image.fromarray(change(np.array(Image.open(path)))).save(tmp_path / f"test/busy/{identify(hash(path))}.jpg")
    assert overlap_of(tmp_path) == "4 of 16 pictures of test look as pictures of an earlier split do"


def test_numbered_photographs_dealt_to_all_splits_are_apart(tmp_path: Path) -> None:
    deal(tmp_path, photographs(), NAMES["numbers"])
    assert overlap_of(tmp_path) == ""


def test_scene_without_events_is_apart_by_its_pictures(tmp_path: Path) -> None:
    deal(tmp_path, still(), lambda n: f"{n * 7919 % 65536:x}x.png")
    assert overlap_of(tmp_path) == ""


def test_clip_without_events_dealt_to_all_splits_is_no_evidence(tmp_path: Path) -> None:
    deal(tmp_path, still(), NAMES["clip and time"])
    assert "lie between frames" in overlap_of(tmp_path)


def test_pictures_of_one_camera_by_chance_are_apart_though_many_look_alike(tmp_path: Path) -> None:
    queries = load_workload(write_workload(tmp_path)).queries
    assert [load_split(query, split).overlap for query in queries for split in ("val", "test")] == [""] * 4


def test_versions_of_one_picture_in_two_splits_are_no_evidence(tmp_path: Path) -> None:
    deal(tmp_path, photographs(), lambda n: f"{'abcdefghijklmnopqrst'[n % 20]}_jpg.rf.{n * 7919:032x}.png")
    assert "versions (.rf.) of pictures of an earlier split" in overlap_of(tmp_path)


def test_pictures_saved_again_under_other_names_are_no_evidence(tmp_path: Path) -> None:
    deal(tmp_path, photographs(), lambda n: f"{n * 7919 % 65536:x}x.png")
    for place, path in enumerate(sorted((tmp_path / "train").rglob("*.png"))[:4]):
        with Image.open(path) as image:
            image.resize((96, 96)).save(tmp_path / f"test/busy/again{'abcd'[place]}.jpg", quality=90)
    assert overlap_of(tmp_path) == "4 of 16 pictures of test look as pictures of an earlier split do"


def test_few_copies_are_a_note_alone(tmp_path: Path) -> None:
    deal(tmp_path, photographs(), NAMES["numbers"])
    for path in sorted((tmp_path / "test").rglob("*.png"))[1:]:
        for number in range(3):
            Image.fromarray(np.random.default_rng(number).integers(0, 255, (64, 64, 3), np.uint8)).save(path)
    source = next((tmp_path / "train/busy").iterdir())
    rng = np.random.default_rng(5)
    for index in range(round(1.5 / OVERLAP.max_share)):
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), np.uint8)).save(tmp_path / f"test/busy/{index}x.png")
    (tmp_path / "test/busy/copy.png").write_bytes(source.read_bytes())
    with collect_notes() as notes:
        assert load_split(make_query(data=tmp_path), "test").overlap == ""
    assert any("1 of 43 pictures of test are also in an earlier split, byte for byte; take" in note for note in notes)
