"""How fast this machine trains, so that what is bounded in time can be planned in work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from merger.bench.workbench import Workbench
from merger.training.loop import Diverged, Recipe

STEPS = 3
"""Steps that are timed, the first of which only warms up."""


def training_speed(
    bench: Workbench, queries: Sequence[str], recipe: Recipe, clock: Callable[[], float] = time.monotonic
) -> float:
    """The work (image passes x FLOPs) that a joint training of these queries does in a second; inf where none is seen.

    Copies of the originals are trained for a few steps, which count as work.
    """
    training = bench.training(bench.models(queries), replace(recipe, epochs=1, frames_per_epoch=STEPS * recipe.batch))
    seen = [(clock(), bench.work.total)]
    training.after_step = lambda: seen.append((clock(), bench.work.total))
    with suppress(Diverged):
        training.epoch()
    (began, before), (ended, after) = seen[1 if len(seen) > 2 else 0], seen[-1]
    return bench.crew.first((after - before) / (ended - began) if ended > began else math.inf)
