"""Score matching: shift a detector's scores until as many detections reach the threshold as its original's.

The score from which a detection counts is chosen once, for the original. A merged model that finds the same objects
with a little less confidence scores far worse at that threshold: on ten seconds of footage, F1 0.88 of it, and
1.00 once as many detections counted. So the biases of the heads, which all scores have in common, are moved until as
many count on train frames. It needs no labels, and heads are private.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gemel.merger.training.data import TrainingSet
from gemel.merger.training.recipe import OPTIMIZER
from gemel.models.detector import Detector, OneStage, read_outputs
from gemel.models.device import retry_with_smaller_batch
from gemel.models.graph.records import SUFFIX as AFFINE
from gemel.models.sharing.layers import layers_of
from gemel.models.tasks import MIN_SCORE, task_of
from gemel.models.workload import Query

BATCH = 32


@dataclass(frozen=True)
class ScoreMatchingConfig:
    """How scores are matched."""

    frames: int = 96
    """Train frames on which detections are counted."""
    slope_frames: int = 4
    """Train frames on which the effect of the biases on the scores is measured."""
    max_shift: float = 3.0
    """Largest shift of the scores, in log-odds."""
    rounds: int = 2
    """Where a score is a product, or there are several classes, the second round corrects the first one."""


CONFIG = ScoreMatchingConfig()
EPSILON = 1e-6


@torch.no_grad()
def scores_of(model: nn.Module, query: Query, data: TrainingSet) -> Tensor:
    """The scores of all detections on train frames spread evenly over the split, f32 (D,), the best first."""
    task, indices = task_of(query), data.spread(CONFIG.frames)
    was_training = model.training
    model.eval()

    def scores(batch: int) -> list[float]:
        found: list[float] = []
        for start in range(0, len(indices), batch):
            chunk = indices[start : start + batch]
            outputs = model(data.frames(chunk, _device(model)))
            sizes = data.prepared.sizes(chunk)
            for prediction in read_outputs(task, model, outputs, sizes, query.classes, preprocess=data.preprocess):
                found += prediction.scores  # type: ignore[union-attr]
        return found

    _, found = retry_with_smaller_batch(BATCH, scores)
    model.train(was_training)
    return torch.tensor(found).sort(descending=True).values


def match_scores(
    model: Detector, query: Query, data: TrainingSet, threshold: float, wanted: int
) -> tuple[dict[str, Tensor], int]:
    """Move the heads' biases so that `wanted` detections on train frames reach `threshold`.

    Returns those moved, by name, and the forward passes it took. None is moved where as many do already, where nothing
    can be counted, or where no bias moves the scores.
    """
    moved: dict[str, Tensor] = {}
    passes = 0
    for _ in range(CONFIG.rounds if wanted and threshold > MIN_SCORE else 0):
        scores = scores_of(model, query, data)
        passes += min(CONFIG.frames, len(data))
        if not len(scores) or int((scores >= threshold).sum()) == wanted:
            break
        shift = _log_odds(torch.tensor(threshold)) - _log_odds(_between(scores, wanted))
        moved.update(_move(model, query, data, float(shift.clamp(-CONFIG.max_shift, CONFIG.max_shift))))
        passes += (1 + OPTIMIZER.backward_passes) * min(CONFIG.slope_frames, len(data))
    return moved, passes


def _move(model: Detector, query: Query, data: TrainingSet, shift: float) -> dict[str, Tensor]:
    """Move the biases of the heads, each as it raises or lowers scores, until those have moved by `shift`."""
    biases = _biases(model, query)
    if not biases:
        return {}
    was_training = model.training
    model.eval()
    with torch.enable_grad():
        for bias in biases.values():
            bias.requires_grad_(True)
        odds = _log_odds(_all_scores(model, data.frames(data.spread(CONFIG.slope_frames), _device(model))))
        slopes = torch.autograd.grad(odds.sum(), list(biases.values()), allow_unused=True) if odds.requires_grad else ()
    model.train(was_training)
    steep = {name: slope for name, slope in zip(biases, slopes) if slope is not None and bool(slope.any())}
    together = float(sum(slope.abs().sum() for slope in steep.values())) / max(1, odds.numel())
    with torch.no_grad():
        for name, slope in steep.items():
            biases[name].add_(slope.sign() * shift / together)
    return {name: biases[name].detach().clone() for name in steep}


def _all_scores(model: Detector, frames: Tensor) -> Tensor:
    outputs = model(frames)
    if isinstance(model, OneStage):
        return model.decode(outputs)[1]
    scores = outputs[1]
    return scores[scores > 0]


def _biases(model: Detector, query: Query) -> dict[str, nn.Parameter]:
    """Those of the heads, or of the affines that have taken them over in an imported graph."""
    modules = dict(model.named_modules())
    paths = [layer.path + suffix for layer in layers_of(query) if layer.head for suffix in ("", AFFINE)]
    return {f"{path}.bias": bias for path in paths if (bias := getattr(modules.get(path), "bias", None)) is not None}


def _between(scores: Tensor, wanted: int) -> Tensor:
    """A score that `wanted` of these reach, between the last of them and the next."""
    last = min(wanted, len(scores)) - 1
    return scores[last : last + 2].mean()


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _log_odds(scores: Tensor) -> Tensor:
    return scores.float().clamp(EPSILON, 1 - EPSILON).logit()
