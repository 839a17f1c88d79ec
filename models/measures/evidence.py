"""What footage is evidence: the rules by which labels, or an original's answers, let a worse model miss its target."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gemel.models.errors import join_names

MAX_NAMES = 4
BLACK = 16
"""The largest value of a black frame: that of limited range, and what compression leaves."""


@dataclass(frozen=True)
class EvidenceConfig:
    """What a split holds at least so that a model that became worse can miss its target there."""

    min_samples: int = 2
    """Frames of each of two answers, or objects: with one answer alone a model that always gives it would do. Whether
    they are enough is for a proof to say (merger.proof), which counts them."""
    min_clips: int = 1
    """Clips that show it, where a split consists of several."""
    min_frames: int = 2
    """Frames that are not black and differ from each other."""
    competent: bool = True
    """Whether the original must be better than chance by the task's margin."""
    apart: bool = True
    """Whether a split must be apart from earlier ones."""


EVIDENCE = EvidenceConfig()


@dataclass(frozen=True)
class ShownAnswers:
    """What each frame of the split `name` shows: the names of its answers or objects; `clips` are None for one clip."""

    name: str
    frames: Sequence[Sequence[str]]
    clips: Sequence[str] | None
    config: EvidenceConfig = EVIDENCE

    def samples(self) -> Counter[str]:
        """Answer -> how often it is shown."""
        return Counter(name for names in self.frames for name in names)

    def shown_in(self) -> dict[str, set[str]]:
        """Answer -> the clips that show it; empty for one clip."""
        clips_by_answer: dict[str, set[str]] = {}
        for names, clip in zip(self.frames, self.clips or (), strict=self.clips is not None):
            for name in names:
                clips_by_answer.setdefault(name, set()).add(clip)
        return clips_by_answer


def find_few_frames(
    name: str, frames: Iterable[np.ndarray], config: EvidenceConfig = EVIDENCE
) -> str:
    """Why the frames of a split are no evidence whatever their labels say; empty once enough of them differ."""
    seen = set[bytes]()
    total = 0
    black = 0
    for frame in frames:
        total += 1
        if frame.max(initial=0) <= BLACK:
            black += 1
        else:
            seen.add(hashlib.sha256(frame.tobytes()).digest())
        if len(seen) >= config.min_frames:
            return ""
    if not seen:
        return f"all {total} frames of {name} are black"
    return f"all {total} frames of {name} are {f'black ({black}) or ' if black else ''}equal"


def find_too_few_objects(shown: ShownAnswers, classes: Sequence[str], noun: str = "object") -> str:
    """Why so many objects are no evidence; empty where those of one class are."""
    where = shown.name
    min_samples = shown.config.min_samples
    samples = shown.samples()
    clips = shown.shown_in()
    class_list = join_names(classes, MAX_NAMES)
    total = samples.total()
    enough = [name for name, count in samples.items() if count >= min_samples]
    if total < min_samples:
        nouns = noun if total == 1 else f"{noun}s"
        return f"{where} holds {total or 'no'} {nouns} ({class_list}); {min_samples} are needed"
    if not enough:
        counts = join_names(
            [f"{count} of '{name}'" for name, count in samples.most_common()], MAX_NAMES
        )
        return f"{where} holds {counts}; {min_samples} {noun}s of one class are needed"
    if shown.clips and all(len(clips[name]) < shown.config.min_clips for name in enough):
        counted = f"all {samples[enough[0]]} {noun}s of {where} ({enough[0]})"
        return f"{counted} are in one clip; {shown.config.min_clips} are needed"
    return ""


def find_one_answer(shown: ShownAnswers) -> str:
    """Why frames are no evidence, of which at least two answers are to be shown; empty where they are."""
    where = shown.name
    min_samples = shown.config.min_samples
    least_clips = shown.config.min_clips
    samples = shown.samples()
    clips = shown.shown_in()
    enough = [name for name, count in samples.items() if count >= min_samples]
    spread = [name for name in enough if not shown.clips or len(clips[name]) >= least_clips]
    if len(spread) > 1:
        return ""
    if len(samples) == 1:
        count = len(shown.frames)
        frames = (
            f"all {count} frames of {where} have" if count > 1 else f"the only frame of {where} has"
        )
        return f"{frames} one answer ({next(iter(samples))})"
    if len(enough) > 1:
        name = next(name for name in enough if name not in spread)
        return f"all {samples[name]} frames of {where} with '{name}' are of one clip; {least_clips} are needed"
    counts = [f"{count} of '{name}'" for name, count in samples.most_common()]
    return f"{where} holds {join_names(counts, MAX_NAMES)}; {min_samples} frames of each of two answers are needed"


def find_constant_answer(shown: ShownAnswers, agreement: float, target: float) -> str:
    """Why frames are no evidence, with all of whose answers a constant one agrees so well; empty where they are."""
    frames = len(shown.frames)
    min_samples = shown.config.min_samples
    if frames < min_samples:
        return f"{shown.name} holds {frames} frame{'' if frames == 1 else 's'}; {min_samples} are needed"
    if agreement < target:
        return ""
    return f"a constant answer agrees by {agreement:.3f} with the original on all {frames} frames of {shown.name}"
