"""Whether a split is apart from earlier ones: frames between those of an earlier split are no evidence.

Names say which pictures may be neighbours: those of one clip, numbers of one series, versions of one picture. Pixels
say whether they are: neighbours of a clip look more alike than any two of its frames; photographs do not.
"""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from gemel.models.files.io import read_bounded
from gemel.models.files.pictures import MAX_PICTURE_BYTES, MAX_PIXELS, PICTURE_FORMATS, PICTURE_HINT
from gemel.models.labels.data_notes import UNIT_AND_TIME, find_copies
from gemel.models.notes import add_note


@dataclass(frozen=True)
class OverlapConfig:
    """How pictures of two splits are compared.

    `max_share` is the part of a split that may not be apart. `thumb` is the side of grey thumbnails;
    `scene_difference` is the root mean square of the difference, of 255, below which two show one scene, and
    `scene_contrast` that as a part of their own deviation, since pictures that were resized differ most at their edges:
    with four times of it independent frames of one camera, on which one thing moves, are alike, too. A picture is again
    there if nothing of its own split is `isolation` times as near. Neighbours by name belong together where their
    median difference is below `nearer` times that of any two, in `pairs` of each, at least `min_pairs`; a static clip,
    in which any two differ by less than `static`, is believed by its names. `checked` and `compared` bound the pictures
    of a split and of earlier ones whose thumbnails are compared.
    """

    max_share: float = 0.05
    thumb: int = 32
    scene_difference: float = 0.75
    scene_contrast: float = 0.04
    isolation: float = 2.0
    nearer: float = 0.6
    pairs: int = 40
    min_pairs: int = 3
    static: float = 2.0
    checked: int = 200
    compared: int = 4000


OVERLAP = OverlapConfig()
APART_HINT = "give splits of different clips, or of times far apart"
VERSION = re.compile(r"(.+)\.rf\.[0-9a-zA-Z]+$")
"""The name of a picture in that of its augmented versions, as Roboflow writes them."""
RANDOM_PART = re.compile(
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<![0-9a-zA-Z])(?=[0-9a-f]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{8,}(?![0-9a-z])"
)
"""Of a name: an identifier, such as Label Studio puts before it, which says nothing of the order."""
NUMBER = re.compile("[0-9]{1,15}")


def note_overlap(where: Path, name: str, paths: Sequence[Path], earlier: Collection[Path]) -> str:
    """Why the pictures of the split `name` are not apart from `earlier` ones, also as a note; empty where they are.

    Copies below that part are a note alone.
    """
    if not paths or not earlier:
        return ""
    shares = {
        "are also in an earlier split, byte for byte": find_copies(paths, earlier),
        "are versions (.rf.) of pictures of an earlier split": _find_versions(paths, earlier),
        "lie between frames of an earlier split in one clip": _find_between(paths, earlier),
        "look as pictures of an earlier split do": _find_alike(paths, earlier),
    }
    for text, share in shares.items():
        problem = f"{round(share * len(paths))} of {len(paths)} pictures of {name} {text}"
        if share > OVERLAP.max_share:
            add_note(where, f"{problem}: scores on them prove nothing", APART_HINT)
            return problem
        # A few copies spoil no proof, but are worth a word.
        if share and text.endswith("byte for byte"):
            add_note(where, problem, "take them out of one")
    return ""


def _find_versions(paths: Sequence[Path], earlier: Iterable[Path]) -> float:
    originals = {match[1] for path in earlier if (match := VERSION.match(path.stem))}
    again = sum(
        bool(match and match[1] in originals)
        for match in (VERSION.match(path.stem) for path in paths)
    )
    return again / len(paths)


# Neighbours by name


def _place_of(path: Path) -> tuple[str, tuple[int, ...]] | None:
    """The series of a picture, and its place there by all numbers of its name; None for a name without a number."""
    stem = path.stem
    if match := UNIT_AND_TIME.match(stem):
        return f"{match[1]}__", (int(match[2]),)
    version = VERSION.match(stem)
    stem = RANDOM_PART.sub("*", version[1] if version else stem)
    numbers = tuple(map(int, NUMBER.findall(stem)))
    return (NUMBER.sub("#", stem), numbers) if numbers else None


def _find_between(paths: Sequence[Path], earlier: Iterable[Path]) -> float:
    """The part of pictures next to one of an earlier split, and between two, in clips whose neighbours look alike."""
    series = defaultdict[str, list[tuple[tuple[int, ...], bool, Path]]](list)
    for is_earlier, group in ((False, paths), (True, earlier)):
        for path in group:
            place = _place_of(path)
            if place is not None:
                series[place[0]].append((place[1], is_earlier, path))
    between = 0
    neighbours = list[tuple[Path, Path]]()
    for members in series.values():
        members.sort(key=lambda member: member[0])
        places = [place for place, member in enumerate(members) if member[1]]
        for place in range(places[0] + 1, places[-1]) if places else ():
            near = [members[at] for at in (place - 1, place + 1) if members[at][1]]
            if near and not members[place][1]:
                between += 1
                neighbours.append((members[place][2], near[0][2]))
    share = between / len(paths)
    return share if share > OVERLAP.max_share and _are_neighbours(neighbours) else 0.0


def _are_neighbours(pairs: Sequence[tuple[Path, Path]]) -> bool:
    """Whether the two of each pair look more alike than pictures of two pairs."""
    chosen = pairs[:: -(-len(pairs) // OVERLAP.pairs)]
    firsts, right = (read_thumbs([pair[side] for pair in chosen]).astype(float) for side in (0, 1))
    # So few pairs could be alike by chance.
    if len(chosen) < OVERLAP.min_pairs:
        return False
    near = float(np.median(np.sqrt(((firsts - right) ** 2).mean(axis=1))))
    shuffled = np.roll(right, len(chosen) // 2, axis=0)
    away = float(np.median(np.sqrt(((firsts - shuffled) ** 2).mean(axis=1))))
    is_clip = UNIT_AND_TIME.match(chosen[0][0].stem) is not None
    return near < OVERLAP.nearer * away or (is_clip and away < OVERLAP.static)


# Neighbours by pixels


def _find_alike(paths: Sequence[Path], earlier: Collection[Path]) -> float:
    """The part of pictures whose scene an earlier split shows, as it is or mirrored, and no other of theirs does.

    A camera that sees nothing for hours shows one scene in every split, and no two pictures of it are copies.
    """
    thumbs = read_thumbs(paths[:: -(-len(paths) // OVERLAP.checked)])
    earlier_thumbs = read_thumbs(list(earlier)[:: -(-len(earlier) // OVERLAP.compared)])
    distances = _distances(thumbs, thumbs)
    np.fill_diagonal(distances, np.inf)
    nearest = distances.min(axis=1)
    turned = np.min(
        [_distances(view, earlier_thumbs).min(axis=1) for view in _turn(thumbs)], axis=0
    )
    reach = np.maximum(OVERLAP.scene_difference, OVERLAP.scene_contrast * thumbs.std(axis=1))
    is_again = (turned <= reach) & (
        nearest > np.maximum(OVERLAP.scene_difference, OVERLAP.isolation * turned)
    )
    return float(is_again.mean()) if is_again.sum() >= OVERLAP.min_pairs else 0.0


def _turn(thumbs: np.ndarray) -> Iterator[np.ndarray]:
    """Thumbnails (N, side * side) in the four turns and their mirror images, as augmented copies show them."""
    pictures = thumbs.reshape(-1, OVERLAP.thumb, OVERLAP.thumb)
    for turns in range(4):
        turned = np.rot90(pictures, turns, (1, 2))
        yield from (view.reshape(len(thumbs), -1) for view in (turned, turned[:, :, ::-1]))


def _distances(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Root mean squares of the differences of thumbnails (N, P) and (M, P): (N, M)."""
    first = rows.astype(np.float32)
    second = columns.astype(np.float32)
    squares = (first**2).sum(1)[:, None] - 2 * first @ second.T + (second**2).sum(1)
    return np.sqrt(np.maximum(squares, 0) / first.shape[1])


def read_thumbs(paths: Iterable[Path]) -> np.ndarray:
    """Grey thumbnails of pictures (N, side * side); of one that does not decode its number, which is like no other."""
    thumbs = list(_read_each(paths))
    return np.stack(thumbs) if thumbs else np.empty((0, OVERLAP.thumb**2), np.uint8)


def _read_each(paths: Iterable[Path]) -> Iterator[np.ndarray]:
    for number, path in enumerate(paths):
        state = path.stat()
        pixels = _read_thumb(path, state.st_size, state.st_mtime_ns)
        noise = np.random.default_rng(number)
        yield (
            noise.integers(0, 256, OVERLAP.thumb**2, np.uint8)
            if pixels is None
            else np.frombuffer(pixels, np.uint8)
        )


@lru_cache(maxsize=2**15)
def _read_thumb(path: Path, nbytes: int, changed_ns: int) -> bytes | None:
    """Of the file as it was at this size and time; None where it does not decode, which its reader says later."""
    from PIL import Image

    side = (OVERLAP.thumb, OVERLAP.thumb)
    try:
        with Image.open(
            io.BytesIO(read_bounded(path, MAX_PICTURE_BYTES, PICTURE_HINT)), formats=PICTURE_FORMATS
        ) as image:
            if image.size[0] * image.size[1] > MAX_PIXELS:
                return None
            image.draft("L", (2 * side[0], 2 * side[1]))
            return image.convert("L").resize(side, Image.Resampling.BOX).tobytes()
    except Exception:  # a damaged picture can fail in any way
        return None
