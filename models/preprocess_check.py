"""Whether an original answers its labelled frames plainly better when they are prepared in another way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

from torch import nn

from gemel.models.data import PreparedFrames, Split
from gemel.models.measures.evaluation import is_competent, predict, score
from gemel.models.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from gemel.models.tasks import task_of
from gemel.models.workload import Query
from gemel.models.zoo import is_zoo_name, preprocess_of

FRAMES, SCORED_FRAMES = 24, 256
"""On so many a change is chosen, and on as many others it must hold; at most so many score an original."""
PLAINLY, STEP = 0.1, 0.02
"""By how much the metric must rise in all, and with each choice."""
VALUES: tuple[dict[str, Any], ...] = (
    {"scale": 255, "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)},
    {"scale": 1, "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)},
    {"scale": 1, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)},
    {"scale": 1, "mean": IMAGENET_MEAN, "std": IMAGENET_STD},
)
CROP_FRACTION = 0.875
"""The usual one of classifiers."""


@dataclass(frozen=True)
class BetterPreprocess:
    """`keys` of a query's `preprocess` that would raise the metric from `current` to `reached` on `frames` of val."""

    keys: dict[str, Any]
    current: float
    reached: float
    frames: int


def describe_preprocess_problem(
    query: Query, model: nn.Module, val: Split, reached: float
) -> tuple[str, str]:
    """Text and remedy where an original is near chance on its labelled val, or another preprocessing is plainly better.

    `reached` is its metric on val. Other ways are tried where it is near chance, and where the preprocessing is not the
    zoo's own. Both are empty where there is nothing to say.
    """
    if val.labels is None:
        return "", ""
    metric = task_of(query).metric
    weak = not is_competent(query, reached)
    better = None
    if weak or query.preprocess is not None or not is_zoo_name(query.model):
        better = find_better_preprocess(query, model, val, every=weak)
    if better is not None:
        keys = ", ".join(f"{key}: {_as_yaml(value)}" for key, value in better.keys.items())
        return (
            f"its original reaches {better.current:.2f} {metric} on {better.frames} frames of val, and "
            f"{better.reached:.2f} with `preprocess: {{{keys}}}`",
            "write that into the query if it was trained so",
        )
    if weak:
        return (
            f"its original reaches only {reached:.2f} {metric} on val, which is no evidence",
            "train it longer, or on more frames, or check `weights`, `classes` and `preprocess`",
        )
    return "", ""


def score_original(query: Query, model: nn.Module, val: Split) -> float:
    """The metric of an original on SCORED_FRAMES of its labelled val."""
    return _measure(query, model, val.at(_draw(val, SCORED_FRAMES)), preprocess_of(query), {})


def find_better_preprocess(
    query: Query, model: nn.Module, val: Split, every: bool = True
) -> BetterPreprocess | None:
    """Another scale, mean, order of channels or way of resizing by which the answers fit the labels plainly better.

    Values are chosen first, then the way of resizing, on some frames of val; on as many others the result must hold.
    Unless `every`, other scales and means are left out: they spoil a model's answers altogether.
    """
    indices = _draw(val)
    half = len(indices) // 2
    chosen_on = val.at(indices[:half] or indices)
    held_on = val.at(indices[half:])
    current = best = preprocess_of(query)
    prepared: dict[tuple[Any, ...], PreparedFrames] = {}
    least = reached = _measure(query, model, chosen_on, current, prepared)
    for ways in (_other_values, _other_resizing):
        candidates = (
            ways(best, query) if every or ways is _other_resizing else [_turn_channels(best)]
        )
        tried = {
            candidate: _measure(query, model, chosen_on, candidate, prepared)
            for candidate in candidates
        }
        winner = max(tried, key=tried.__getitem__)
        if tried[winner] >= reached + STEP:
            best = winner
            reached = tried[winner]
    if reached < least + PLAINLY:
        return None
    before, after = (
        _measure(query, model, held_on, preprocess, {}) for preprocess in (current, best)
    )
    if after < before + PLAINLY:
        return None
    changed = {
        item.name: value
        for item in fields(best)
        if (value := getattr(best, item.name)) != getattr(current, item.name)
    }
    return BetterPreprocess(changed, before, after, len(held_on))


def _turn_channels(now: Preprocess) -> Preprocess:
    return replace(now, channels="bgr" if now.channels == "rgb" else "rgb")


def _other_values(now: Preprocess, query: Query) -> Iterator[Preprocess]:
    """Other channels, other values, and both: what changes less comes first."""
    turned = _turn_channels(now)
    yield turned
    for base in (now, turned):
        for values in VALUES:
            if any(getattr(now, key) != value for key, value in values.items()):
                yield replace(base, **values)


def _other_resizing(now: Preprocess, query: Query) -> Iterator[Preprocess]:
    for mode in (
        ("stretch", "letterbox", "center-crop")
        if query.task == "classification"
        else ("stretch", "letterbox")
    ):
        if mode != now.resize:
            yield replace(
                now, resize=mode, crop_fraction=CROP_FRACTION if mode == "center-crop" else 1.0
            )


def _measure(
    query: Query,
    model: nn.Module,
    split: Split,
    preprocess: Preprocess,
    prepared: dict[tuple[Any, ...], PreparedFrames],
) -> float:
    """The metric over these frames, with the threshold that suits them best; frames of one geometry are kept."""
    adapted = replace(query, preprocess=preprocess)
    task = task_of(query)
    geometry = (preprocess.resize, preprocess.crop_fraction)
    answers = predict(model, adapted, prepared.setdefault(geometry, PreparedFrames(adapted, split)))
    assert split.labels is not None
    return score(
        task, answers, split.labels, query.classes, task.choose_threshold(answers, split.labels)
    )


def _draw(val: Split, max_frames: int = 2 * FRAMES) -> list[int]:
    """Frames at random: labels may alternate, so that even distances could meet one of them alone."""
    return Random(0).sample(range(len(val)), min(len(val), max_frames))


def _as_yaml(value: Any) -> str:
    return (
        f"[{', '.join(f'{number:g}' for number in value)}]"
        if isinstance(value, tuple)
        else str(value)
    )
