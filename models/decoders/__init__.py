"""Decoders: what the outputs of an imported network mean. Each family is one file of this package."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from gemel.models.decoders.decoder import DECODERS, Decoder, GraphHead, are_rivals, class_names
from gemel.models.errors import InputError, join_names
from gemel.models.labels.class_names import UNUSED, find_names

AUTO = "auto"
ULTRALYTICS_TASKS = {"detect": "detection", "classify": "classification", "segment": "detection", "obb": "detection",
                     "pose": "keypoints"}  # fmt: skip
COCO_WIDTH, COCO_WIDTH_BY_NUMBER, IMAGENET_WIDTH = 80, 91, 1000
MAX_SHOWN = 4
MIN_MAP_SIDE = 16
"""Of an output that is a map."""


def choose_decoder(
    name: str, head: GraphHead, task: str | None, count: int | None, where: str | Path
) -> Decoder:
    """The decoder of that name, or of "auto": the one that fits the outputs, the metadata and `count` classes best.

    Raises InputError for an unknown name, for one that does not fit the outputs, and where none or several fit.
    """
    DECODERS.check(name, where, "decoder", [AUTO])
    if not head.outputs:
        raise InputError(where, "has no outputs", "export it again", "decoder")
    candidates = DECODERS.usable() if name == AUTO else [DECODERS.find(name, where, "decoder")]
    families = [cls for cls in candidates if task in (None, cls.task)]
    families = [
        cls
        for cls in families
        if cls.key in head.metadata or not cls.key or cls.name == name or task
    ]
    decoders = [decoder for cls in families for decoder in cls.fit(head)]
    if not decoders:
        shapes = ", ".join(
            f"{output.name} {list(output.shape)}" for output in head.outputs[:MAX_SHOWN]
        )
        subject = "no decoder" if name == AUTO else f"the decoder {name} does not fit"
        fits = f" for {task}" if task and name == AUTO else ""
        problem = f"{subject}{fits} {'fits ' if name == AUTO else ''}the outputs {shapes}"
        hint = suggest_task(head, task) if name == AUTO else "use `decoder: auto`"
        raise InputError(where, problem, hint, "decoder")
    ranks = [_rank(decoder, head, count) for decoder in decoders]
    best = [decoder for decoder, rank in zip(decoders, ranks, strict=True) if rank == max(ranks)]
    # Outputs alone do not tell these families apart.
    if len({decoder.name for decoder in best}) > 1:
        names = join_names([decoder.name for decoder in best])
        raise InputError(
            where, f"its outputs fit several decoders: {names}", "name one as `decoder`", "decoder"
        )
    _check_rivals(best, head, where)
    return best[0]


def suggest_task(head: GraphHead, task: str | None) -> str:
    """What to do with a file whose outputs no decoder explains, by what they look like."""
    shapes = [output.shape for output in head.outputs]
    sides = [shape for shape in shapes if len(shape) > 1 and min(shape[-2:]) >= MIN_MAP_SIDE]
    if any(len(shape) == 3 and shape[0] > 1 for shape in sides):
        return (
            "these are maps: `task: segmentation` if they are classes of pixels, "
            "`task: tensor` if heatmaps of points or other values"
        )
    if any(len(shape) == 2 or shape[0] == 1 for shape in sides) and len(shapes) == 1:
        return "one value for each place, as a depth or a text has: name `task: tensor`"
    if len(shapes) == 1 and len(shapes[0]) == 2:
        return "a row for each step, as a reader of text has: name `task: tensor`"
    if any(len(shape) == 1 for shape in shapes) and task in (None, "detection", "keypoints"):
        tasks = "`task: classification`, `embedding` for features, or `tensor` for other values"
        return f"one row for a frame: name {tasks}"
    return "export it without its postprocessing, or name `task: tensor` to compare its outputs as they are"


def _check_rivals(best: Sequence[Decoder], head: GraphHead, where: str | Path) -> None:
    """Refuse to choose one of several classifiers' outputs where nothing says which counts."""
    if best[0].task != "classification":
        return
    outputs = [head.outputs[place] for decoder in best for place in decoder.places]
    rivals = [output for output in outputs[1:] if are_rivals(outputs[0], output)]
    if rivals:
        shown = join_names(
            [f"{output.name} {list(output.shape)}" for output in (outputs[0], *rivals)]
        )
        hint = "export it with the one that counts alone"
        if len({output.shape for output in outputs}) > 1:
            hint = f"name all `classes` of the one that counts, or {hint}"
        raise InputError(
            where, f"has several outputs that may be its classes: {shown}", hint, "classes"
        )


def choose_columns(
    decoder: Decoder, metadata: Mapping[str, str], classes: Sequence[str], where: str | Path
) -> tuple[int, ...]:
    """The place of each class among the scores; `classes` names all of the file's, or some by the file's own names.

    Raises InputError where they do not fit.
    """
    names = known_names(decoder, metadata)
    misfit = find_misnaming(decoder, metadata)
    # The query names classes as the file does: any of them, in any order.
    if names and set(classes) <= set(names):
        return tuple(names.index(name) for name in classes)
    # All of them under names of the query's own, in the file's order.
    if len(classes) == decoder.width and (misfit or not class_names(metadata)):
        return tuple(range(decoder.width))
    hint = f"name all {decoder.width} in their order"
    if misfit:
        raise InputError(where, misfit, hint, "classes")
    if not names:
        problem = f"answers with {decoder.counted} which it does not name, where {len(classes)} were asked for"
        raise InputError(where, problem, hint, "classes")
    unknown = next(name for name in classes if name not in names)
    if namesakes := [name for name in names if name.rpartition(" (")[0] == unknown]:
        problem = f"has {len(namesakes)} outputs of the same name '{unknown}'"
        raise InputError(
            where,
            problem,
            f"ask for {join_names(namesakes)}: the number is the output's",
            "classes",
        )
    near = difflib.get_close_matches(unknown, names, n=3) or names
    raise InputError(
        where, f"has no class '{unknown}'", f"its classes are {join_names(near)}", "classes"
    )


def find_misnaming(decoder: Decoder, metadata: Mapping[str, str]) -> str:
    """Why the names that a file states are not those of a decoder's classes; empty where nothing is wrong."""
    stated = find_names(metadata)
    if stated is None or decoder.takes(len(stated.names)):
        return ""
    if not stated.names:
        return f"names its classes in a form that is not read (`{stated.key}`)"
    return f"names {len(stated.names)} classes (`{stated.key}`) and answers with {decoder.counted}"


def number_namesakes(names: Sequence[str]) -> tuple[str, ...]:
    """Names of which none occurs twice: columns of one name get their number, `crane (134)` and `crane (517)`."""
    counts = Counter(names)
    return tuple(
        f"{name} ({place})" if counts[name] > 1 else name for place, name in enumerate(names)
    )


def known_names(decoder: Decoder, metadata: Mapping[str, str]) -> tuple[str, ...] | None:
    """The name of each column of the scores: the file's own, else COCO's or ImageNet's where the width is theirs.

    None where the file names none or others.
    """
    stated = find_names(metadata)
    if stated is not None:
        if not decoder.takes(len(stated.names)):
            return None
        spare = range(len(stated.names), decoder.width)
        return number_namesakes([*stated.names, *(f"{UNUSED}{place}" for place in spare)])
    if decoder.task == "keypoints":
        return ("person",) if decoder.width == 1 else None
    if decoder.task == "detection":
        if decoder.width == COCO_WIDTH:
            return coco_names()
        return coco_numbers() if decoder.width == COCO_WIDTH_BY_NUMBER else None
    return imagenet_names() if decoder.width == IMAGENET_WIDTH else None


@cache
def coco_numbers() -> tuple[str, ...]:
    """COCO's categories by their number; 0 and the numbers never given have names that no class has."""
    names = _known_classes()["coco"]
    return tuple(
        f"{UNUSED}{index}" if name in ("N/A", "__background__") else name
        for index, name in enumerate(names)
    )


@cache
def coco_names() -> tuple[str, ...]:
    """COCO's 80 classes."""
    return tuple(name for name in coco_numbers() if not name.startswith(UNUSED))


@cache
def imagenet_names() -> tuple[str, ...]:
    """ImageNet's 1000 classes, as torchvision names them."""
    return number_namesakes(_known_classes()["imagenet"])


@cache
def _known_classes() -> dict[str, list[str]]:
    return json.loads(Path(__file__).with_name("known_classes.json").read_text("utf-8"))


def task_of_metadata(metadata: Mapping[str, str]) -> str | None:
    """The task that the exporter names; None where it names none that there is."""
    return ULTRALYTICS_TASKS.get(metadata.get("task", ""))


def _rank(decoder: Decoder, head: GraphHead, count: int | None) -> tuple[int, ...]:
    """How well a decoder that fits explains the file: by the classes that it names, its family, the classes asked for,
    COCO's, and how much of it.
    """
    names = class_names(head.metadata)
    family = head.family.replace("-", "")
    return (
        names is not None and decoder.takes(len(names)),
        any(word in family for word in decoder.words or (decoder.name,)),
        decoder.width == count,
        decoder.width == COCO_WIDTH,
        len(decoder.places),
    )
