"""What footage is evidence: the rules by which labels, or an original's answers, let a worse model miss its target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from models.errors import join_names

MAX_NAMES = 4


@dataclass(frozen=True)
class EvidenceConfig:
    """What a split holds at least so that a model that became worse can miss its target there."""

    min_samples: int = 20
    """Frames of each of two answers, or objects; frames with anything to compare of a drift check."""
    min_clips: int = 2
    """Clips that show it, where a split consists of several: the interval leaves out one at a time."""


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
        found: dict[str, set[str]] = {}
        for names, clip in zip(self.frames, self.clips or (), strict=self.clips is not None):
            for name in names:
                found.setdefault(name, set()).add(clip)
        return found


def find_too_few_objects(shown: ShownAnswers, classes: Sequence[str], what: str = "object") -> str:
    """Why so many objects are no evidence; empty where they are."""
    where, few, total = shown.name, shown.config.min_samples, shown.samples().total()
    clips, named = {clip for own in shown.shown_in().values() for clip in own}, join_names(classes, MAX_NAMES)
    if total < few:
        return f"{where} holds {total or 'no'} {what}{'' if total == 1 else 's'} ({named}); {few} are needed"
    if shown.clips and len(clips) < shown.config.min_clips:
        return f"all {total} {what}s of {where} ({named}) are in one clip; {shown.config.min_clips} are needed"
    return ""


def find_one_answer(shown: ShownAnswers) -> str:
    """Why frames are no evidence, of which at least two answers are to be shown; empty where they are."""
    where, few, least_clips = shown.name, shown.config.min_samples, shown.config.min_clips
    samples, clips = shown.samples(), shown.shown_in()
    enough = [name for name, count in samples.items() if count >= few]
    spread = [name for name in enough if not shown.clips or len(clips[name]) >= least_clips]
    if len(spread) > 1:
        return ""
    if len(samples) == 1:
        count = len(shown.frames)
        frames = f"all {count} frames of {where} have" if count > 1 else f"the only frame of {where} has"
        return f"{frames} one answer ({next(iter(samples))})"
    if len(enough) > 1:
        name = next(name for name in enough if name not in spread)
        return f"all {samples[name]} frames of {where} with '{name}' are of one clip; {least_clips} are needed"
    counts = [f"{count} of '{name}'" for name, count in samples.most_common()]
    return f"{where} holds {join_names(counts, MAX_NAMES)}; {few} frames of each of two answers are needed"


def find_constant_answer(shown: ShownAnswers, agreement: float, target: float) -> str:
    """Why frames are no evidence, with all of whose answers a constant one agrees so well; empty where they are."""
    frames, few = len(shown.frames), shown.config.min_samples
    if frames < few:
        return f"{shown.name} holds {frames} frame{'' if frames == 1 else 's'}; {few} are needed"
    if agreement < target:
        return ""
    return f"a constant answer agrees by {agreement:.3f} with the original on all {frames} frames of {shown.name}"
