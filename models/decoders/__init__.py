"""Decoders: what the outputs of an imported network mean. Each family is one file of this package."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from models.decoders import classifier, detr, end2end, fastestdet, nanodet, ssd, yolo, yolo_pose, yolov5, yolox  # noqa: F401
from models.decoders.registry import DECODERS, UNUSED, Decoder, GraphHead, class_names
from models.errors import InputError, join_names

AUTO = "auto"
ULTRALYTICS_TASKS = {"detect": "detection", "classify": "classification", "segment": "detection", "pose": "keypoints"}
FAMILY_WORDS = {
    "detr": ("detr", "dfine", "deim"),
    "yolo": ("yolov8", "yolo9", "yolo11", "yolo12", "yolo1"),
    "yolo-end2end": ("yolov10", "yolo26"),
}
"""What a file's metadata call a family, where that is not the decoder's name."""
COCO_WIDTH, COCO_WIDTH_BY_NUMBER, IMAGENET_WIDTH = 80, 91, 1000
MAX_SHOWN = 4


def choose_decoder(name: str, head: GraphHead, task: str | None, count: int | None, where: str | Path) -> Decoder:
    """The decoder of that name, or of "auto": the one that fits the outputs, the metadata and `count` classes best.

    Raises InputError for an unknown name, for one that does not fit the outputs, and where none or several fit.
    """
    if name != AUTO and name not in DECODERS:
        near = difflib.get_close_matches(name, DECODERS, n=1) or list(DECODERS)
        raise InputError(
            where, f"there is no decoder '{name}'", f"use auto or one of {join_names(near, 20)}", "decoder"
        )
    if not head.outputs:
        raise InputError(where, "has no outputs", "export it again", "decoder")
    families = [cls for cls in DECODERS.values() if name in (AUTO, cls.name) and task in (None, cls.task)]
    families = [cls for cls in families if cls.key in head.metadata or not cls.key or cls.name == name or task]
    found = [decoder for cls in families for decoder in cls.fit(head)]
    if not found:
        shapes = ", ".join(f"{one.name} {list(one.shape)}" for one in head.outputs[:MAX_SHOWN])
        what = "no decoder" if name == AUTO else f"the decoder {name} does not fit"
        fits = f" for {task}" if task and name == AUTO else ""
        problem = f"{what}{fits} {'fits ' if name == AUTO else ''}the outputs {shapes}"
        hint = "export it without its postprocessing, or name another `task`" if name == AUTO else "use `decoder: auto`"
        raise InputError(where, problem, hint, "decoder")
    ranks = [_rank(decoder, head, count) for decoder in found]
    best = [decoder for decoder, rank in zip(found, ranks, strict=True) if rank == max(ranks)]
    if len({decoder.name for decoder in best}) > 1:
        names = join_names([decoder.name for decoder in best])
        raise InputError(where, f"its outputs fit several decoders: {names}", "name one as `decoder`", "decoder")
    return best[0]


def choose_columns(
    decoder: Decoder, metadata: Mapping[str, str], classes: Sequence[str], where: str | Path
) -> tuple[int, ...]:
    """The place of each class among the scores; `classes` names all of the file's, or some by the file's own names.

    Raises InputError where they do not fit.
    """
    names = known_names(decoder, metadata)
    if names and set(classes) <= set(names):
        return tuple(names.index(name) for name in classes)
    if len(classes) == decoder.width and not class_names(metadata):
        return tuple(range(decoder.width))
    if not names:
        problem = f"answers with {decoder.width} classes, which it does not name, where {len(classes)} were asked for"
        raise InputError(where, problem, f"name all {decoder.width} in their order", "classes")
    unknown = next(name for name in classes if name not in names)
    near = difflib.get_close_matches(unknown, names, n=3) or names
    raise InputError(where, f"has no class '{unknown}'", f"its classes are {join_names(near)}", "classes")


def known_names(decoder: Decoder, metadata: Mapping[str, str]) -> tuple[str, ...] | None:
    """The classes in the order of the scores: the file's own, else COCO's or ImageNet's where the width is theirs."""
    names = class_names(metadata)
    if names and len(names) <= decoder.width:
        return names
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
    from torchvision.models.detection import RetinaNet_ResNet50_FPN_Weights

    names = RetinaNet_ResNet50_FPN_Weights.DEFAULT.meta["categories"]
    return tuple(f"{UNUSED}{index}" if name in ("N/A", "__background__") else name for index, name in enumerate(names))


@cache
def coco_names() -> tuple[str, ...]:
    """COCO's 80 classes."""
    return tuple(name for name in coco_numbers() if not name.startswith(UNUSED))


@cache
def imagenet_names() -> tuple[str, ...]:
    """ImageNet's 1000 classes, as torchvision names them."""
    from torchvision.models import ResNet18_Weights

    return tuple(ResNet18_Weights.DEFAULT.meta["categories"])


def task_of_metadata(metadata: Mapping[str, str]) -> str | None:
    """The task that the exporter names; None where it names none that there is."""
    return ULTRALYTICS_TASKS.get(metadata.get("task", ""))


def _rank(decoder: Decoder, head: GraphHead, count: int | None) -> tuple[bool, ...]:
    """How well a decoder that fits explains the file: by the classes that it names, its family, the classes asked for,
    and COCO's.
    """
    names, family = class_names(head.metadata), head.family.replace("-", "")
    return (
        names is not None and decoder.width == len(names),
        any(word in family for word in FAMILY_WORDS.get(decoder.name, (decoder.name,))),
        decoder.width == count,
        decoder.width == COCO_WIDTH,
    )
