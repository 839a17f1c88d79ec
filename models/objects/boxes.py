"""Which annotations of other programs are boxes of their picture, and where: one rule for training and scoring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

import numpy as np

from gemel.models.errors import InputError, join_names
from gemel.models.files.pictures import LabelledPicture, PictureSize, natural_key
from gemel.models.notes import add_note
from gemel.models.predictions import BOX_SHARE, Box, BoxLabels, Outline, Points, PoseLabels


@dataclass(frozen=True)
class BoxRules:
    """What is taken for a box, and for boxes of another form.

    A box thinner than `min_side_px` within its picture is none. One may end `rounding_px` outside without a note.
    Boxes within 0..1 are fractions where pictures are larger than `min_picture_px`. Boxes within 0..100 are percents
    where they spread over `min_percent_spread` of pictures above `min_percent_picture_px`; else a note asks.
    Boxes have another form where `min_leaving` of them and the fraction `min_leaving_share` leave the picture and all
    fit in that form, or a `clear_leaving_share` leaves and `clear_fitting_share` fit.
    """

    min_side_px: float = 0.1
    rounding_px: float = 1.0
    min_picture_px: int = 16
    min_percent_picture_px: int = 150
    min_percent_spread: float = 50.0
    min_leaving: int = 3
    min_leaving_share: float = 0.02
    clear_leaving_share: float = 0.25
    clear_fitting_share: float = 0.9


RULES = BoxRules()


class LeftOut(str, Enum):
    """Why an annotation is no box of its picture."""

    PICTURE = "of pictures that are not listed"
    CATEGORY = "of categories that are not listed"
    NO_BOX = "without bbox, polygons or mask"
    NO_AREA = "without width or height"
    FRACTION = "within the first pixel"
    OUTSIDE = "outside the picture"
    DUPLICATE = "exact duplicates"


class BoxForm(str, Enum):
    """What the four numbers of a box are."""

    SIZE = "x, y, width, height"
    CENTRE = "centre x, centre y, width, height"
    CORNERS = "x0, y0, x1, y1"


@dataclass(frozen=True)
class BoxSource:
    """The file that boxes come from, the key for its errors, and the form in which they should be there."""

    path: Path
    key: str
    form: BoxForm
    unit: str
    hint: str


@dataclass(frozen=True)
class Pose:
    """The points of an object as given (x, y, labelled above 0), and its area in pixels of the picture as given."""

    points: Points
    area: float | None = None


@dataclass
class BoxedPicture:
    """A picture, its size as decoded, what takes the boxes as given to its pixels, and the boxes found."""

    path: Path
    size: PictureSize
    scale: tuple[float, float]
    objects: list[tuple[str, Box]] = field(default_factory=list)
    poses: list[Pose] | None = None
    outlines: list[Outline] = field(default_factory=list)
    crowds: list[tuple[str, Box]] = field(default_factory=list)


NO_PICTURE, NO_BOX = BoxedPicture(Path(), PictureSize(0, 0), (1.0, 1.0)), (0.0, 0.0, 0.0, 0.0)


@dataclass
class BoxRow:
    """An annotation at one place of the file; `box` is as given, and then corners in the picture.

    `outline` is that of its mask or rotated box, in the unit of its box as given; empty where it has none.
    """

    where: str
    picture: BoxedPicture
    name: str
    box: Box
    is_crowd: bool = False
    reason: LeftOut | None = None
    pose: Pose | None = None
    is_clipped: bool = False
    outline: Outline = ()


def collect_labels(
    source: BoxSource,
    rows: Sequence[BoxRow],
    pictures: Sequence[BoxedPicture],
    sources: Mapping[str, str],
    query: str,
    with_outlines: bool = False,
) -> list[LabelledPicture]:
    """The pictures in the order of their names with their boxes of these categories, clipped.

    `sources` gives the query's class of each category. `with_outlines` adds those of the objects where all have one,
    else a note. Notes count what is left out or clipped. Raises InputError for boxes in another form or unit, of other
    pictures, and where none is a box.
    """
    path = source.path
    _clip_boxes(source, [row for row in rows if row.reason is None])
    seen: set[tuple[Path, str, Box]] = set()
    for row in rows:
        key = (row.picture.path, row.name, row.box)
        if row.reason is None and not row.is_crowd:
            row.reason = LeftOut.DUPLICATE if key in seen else None
            seen.add(key)
    if rows and all(row.reason for row in rows):
        raise InputError(
            path,
            f"none of its annotations is a box: {_count_reasons(rows)}",
            source.hint,
            source.key,
        )
    named_rows = [row for row in rows if row.name in sources or not row.name]
    valid = [row for row in named_rows if row.reason is None]
    objects = [row for row in valid if not row.is_crowd]
    bare = sum(not row.outline for row in objects) if with_outlines else 0
    if bare:
        text = f"{bare} of {len(objects)} objects have a box alone, so all are compared by boxes (query {query})"
        add_note(path, text, "give each its polygon, as its model finds masks or rotated boxes")
    for row in objects if with_outlines and not bare else ():
        across, down = row.picture.scale
        row.picture.outlines.append(
            tuple(tuple((x * across, y * down) for x, y in part) for part in row.outline)
        )
    for row in valid:
        (row.picture.crowds if row.is_crowd else row.picture.objects).append(
            (sources[row.name], row.box)
        )
        if row.pose is not None and not row.is_crowd:
            assert row.picture.poses is not None
            row.picture.poses.append(row.pose)
    if valid and all(row.is_crowd for row in valid):
        problem = f"all {len(valid)} annotations of query {query} are crowd regions, so there is no object to find"
        raise InputError(
            path, problem, "set iscrowd and ignore to 0 where it is one object", source.key
        )
    if len(valid) < len(named_rows):
        text = f"annotations are left out of training and scoring (query {query}): {_count_reasons(named_rows)}"
        add_note(path, text, "correct them, or take them out")
    if clipped := sum(row.is_clipped for row in valid):
        text = f"{clipped} boxes end outside their picture and are clipped to it (query {query})"
        add_note(
            path,
            text,
            f"it should hold {source.form.value} in {source.unit} of the upright picture",
        )
    if crowds := sum(row.is_crowd for row in valid):
        text = f"{crowds} regions (iscrowd, ignore or difficult) are no objects to train on or to find (query {query})"
        add_note(
            path,
            f"{text}; detections in them are not counted",
            "set the key to 0 if they are single objects",
        )
    labelled = (
        LabelledPicture(picture.path, _add_poses(picture, _labels_of(picture)), picture.size)
        for picture in pictures
    )
    return sorted(labelled, key=lambda picture: natural_key(picture.path))


def note_turned(path: Path, pictures: Sequence[BoxedPicture]) -> None:
    """Note the pictures that an EXIF tag turns: boxes are taken as drawn on what it shows."""
    turned = [picture.path.name for picture in pictures if picture.size.orientation > 1]
    if turned:
        text = (
            f"{len(turned)} pictures are turned or mirrored by an EXIF tag: {join_names(turned, 3)}"
        )
        add_note(
            path,
            f"{text}; boxes are taken as drawn on the turned picture",
            "else save the pictures without tag",
        )


def _labels_of(picture: BoxedPicture) -> BoxLabels:
    labels = _labels(picture.objects, _labels(picture.crowds) if picture.crowds else None)
    return replace(labels, outlines=tuple(picture.outlines))


def _labels(rows: Sequence[tuple[str, Box]], crowds: BoxLabels | None = None) -> BoxLabels:
    return BoxLabels(tuple(name for name, _ in rows), tuple(box for _, box in rows), crowds)


def _add_poses(picture: BoxedPicture, labels: BoxLabels) -> BoxLabels:
    """The labels with the points and areas of their objects, where these were read, in pixels of the picture."""
    if picture.poses is None:
        return labels
    across, down = picture.scale
    points = tuple(
        tuple((x * across, y * down, seen) for x, y, seen in pose.points) for pose in picture.poses
    )
    areas = [
        across * down * pose.area if pose.area else BOX_SHARE * (x1 - x0) * (y1 - y0)
        for pose, (x0, y0, x1, y1) in zip(picture.poses, labels.boxes, strict=True)
    ]
    return PoseLabels(labels.classes, labels.boxes, labels.crowds, points, tuple(areas))


def _count_reasons(rows: Sequence[BoxRow]) -> str:
    counts = Counter(row.reason for row in rows if row.reason)
    first = {row.reason: row.where for row in reversed(rows)}
    return ", ".join(
        f"{count} {reason.value} (first {first[reason]})" for reason, count in counts.items()
    )


def _corners(boxes: np.ndarray, form: BoxForm) -> tuple[np.ndarray, np.ndarray]:
    """Both corners (N, 2) of boxes of this form."""
    first, second = np.hsplit(boxes, 2)
    if form is BoxForm.CORNERS:
        return first, second
    starts = first - second / 2 if form is BoxForm.CENTRE else first
    return starts, starts + second


def _clip_boxes(source: BoxSource, rows: Sequence[BoxRow]) -> None:
    """Make the boxes corners in pixels of the picture, clipped to it, and find those that are none.

    Raises InputError for boxes in fractions, percents or another form, and for those of other pictures.
    """
    stated = np.array([row.box for row in rows], float).reshape(-1, 4)
    scales = np.array([row.picture.scale * 2 for row in rows], float).reshape(-1, 4)
    sizes = np.array([row.picture.size[:2] for row in rows], float).reshape(-1, 2)
    with np.errstate(all="ignore"):  # NaN and infinities are no boxes
        starts, ends = _corners(stated * scales, source.form)
        low = np.clip(starts, 0, sizes)
        high = np.clip(ends, 0, sizes)
        real = np.all(np.isfinite(stated), axis=1) & np.all(
            ends - starts >= RULES.min_side_px, axis=1
        )
        fraction = np.all(
            (stated >= 0) & (stated <= 1) & (stated[:, 2:].min(axis=1, keepdims=True) > 0), axis=1
        )
        fraction &= np.all(
            (sizes > RULES.min_picture_px) & (scales[:, :2] <= RULES.min_picture_px), axis=1
        )
        outside = real & ~fraction & np.any(high - low < RULES.min_side_px, axis=1)
        cut = np.any((low - starts > RULES.rounding_px) | (ends - high > RULES.rounding_px), axis=1)
        _check_form(
            source,
            (stated * scales)[real & ~fraction],
            sizes[real & ~fraction],
            cut[real & ~fraction],
        )
    boxes, fractions, away = (
        np.count_nonzero(mask) for mask in (real | fraction, fraction, outside)
    )
    if 2 * fractions > boxes:
        problem = (
            f"{fractions} of {boxes} boxes lie within 0..1: these are fractions; COCO wants pixels"
        )
        hint = "multiply x and width by the picture's width, y and height by its height"
        raise InputError(source.path, problem, hint, source.key)
    if 2 * away > boxes:
        hint = "they are of pictures of another size: give its width and height, or correct them"
        raise InputError(
            source.path, f"{away} of {boxes} boxes lie outside their picture", hint, source.key
        )
    corners = np.hstack([low, high]).tolist()
    for place, row in enumerate(rows):
        row.box = tuple(corners[place])
        row.is_clipped = bool(cut[place])
        if fraction[place]:
            row.reason = LeftOut.FRACTION
        elif not real[place]:
            row.reason = LeftOut.NO_AREA
        elif outside[place]:
            row.reason = LeftOut.OUTSIDE


def _check_form(
    source: BoxSource, boxes: np.ndarray, sizes: np.ndarray, leaves: np.ndarray
) -> None:
    """Raise InputError for boxes that leave their pictures and fit in another form, and for percents."""
    leaving = np.count_nonzero(leaves)
    count = len(boxes)
    starts, ends = _corners(boxes, source.form)
    for form in BoxForm:
        low, high = _corners(boxes, form)
        edge = RULES.rounding_px
        fitting = np.count_nonzero(
            np.all((low >= -edge) & (high > low) & (high <= sizes + edge), axis=1)
        )
        some = (
            leaving >= max(RULES.min_leaving, RULES.min_leaving_share * count) and fitting == count
        )
        many = leaving >= max(RULES.min_leaving, RULES.clear_leaving_share * count)
        if form is not source.form and (
            some or (many and fitting >= RULES.clear_fitting_share * count)
        ):
            problem = f"{leaving} of {count} boxes leave their picture as {source.form.value} and fit as {form.value}"
            raise InputError(
                source.path, problem, f"write each box as {source.form.value}", source.key
            )
    if source.unit != "pixels" or count < RULES.min_leaving or starts.min() < 0 or ends.max() > 100:
        return
    text = f"all {count} boxes lie within 0..100, in pictures of {sizes.min():.0f} pixels and more"
    is_spread = np.all(ends.max(axis=0) - starts.min(axis=0) >= RULES.min_percent_spread)
    is_large = bool(np.all(sizes >= RULES.min_percent_picture_px))
    if (is_spread and is_large) or leaving >= max(
        RULES.min_leaving, RULES.clear_leaving_share * count
    ):
        hint = "make them pixels; if they are, crop the pictures to that corner"
        raise InputError(
            source.path, f"{text}: these are percents; COCO wants pixels", hint, source.key
        )
    if is_large:
        add_note(source.path, text, "if these are percents, make them pixels")
