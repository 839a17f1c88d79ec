"""What the outputs of an imported network mean to its task, in NumPy for boxes and in torch for training alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gemel.models.arrays import Array
from gemel.models.decoders import choose_columns, choose_decoder
from gemel.models.decoders.classifier import Classifier
from gemel.models.decoders.decoder import Boxes, Decoder, GraphHead, Outputs, Poses
from gemel.models.decoders.grids import ALL_ROWS, Rows
from gemel.models.decoders.outputs import RawOutputs, find_outputs
from gemel.models.objects.candidates import MAX_CANDIDATES, BoxReader, Candidates, choose_best
from gemel.models.preprocess import Size
from gemel.models.tasks import TASKS


@dataclass(frozen=True)
class GraphBoxes(BoxReader):
    """Reads a detector's outputs, each (N, ...), by the decoder of its family, for an input of `size` (H, W).

    `columns` are the scores of the query's classes.
    """

    decoder: Decoder
    size: Size
    columns: tuple[int, ...]

    @property
    def nms_iou(self) -> float | None:  # type: ignore[override]
        """That of the family."""
        return self.decoder.nms_iou

    def answer(self, outputs: Outputs) -> tuple[Array, ...]:
        """The outputs as they are: `candidates` reads them."""
        return tuple(outputs)

    def decode(self, outputs: Outputs, rows: Rows = ALL_ROWS) -> Boxes | Poses:
        """The decoder's candidates, or those in some rows, with the scores of the query's classes alone."""
        boxes, scores, *points = self.decoder.decode(outputs, self.size, rows)
        if len(self.columns) != scores.shape[-1]:
            scores = scores[..., list(self.columns)]
        return (boxes, scores, points[0]) if points else (boxes, scores)

    def candidates(self, outputs: Sequence[np.ndarray], min_score: float) -> list[Candidates]:
        """The best ones; only rows that can reach `min_score` are decoded."""
        frames = range(len(outputs[0]))
        return [
            self._of_frame([output[frame : frame + 1] for output in outputs], min_score)
            for frame in frames
        ]

    def _of_frame(self, outputs: Sequence[np.ndarray], min_score: float) -> Candidates:
        bounds = self.decoder.bounds(outputs)
        rows = ALL_ROWS if bounds is None else np.flatnonzero(bounds[0] >= min_score)
        decoded = self.decode(outputs, rows)
        shapes = {
            name: values[0]
            for name, values in self.decoder.shapes(outputs, self.size, rows).items()
        }
        best = choose_best(
            *(part[0] for part in decoded),
            min_score=min_score,
            max_candidates=MAX_CANDIDATES,
            **shapes,
        )
        place = getattr(self.decoder, "prototypes", None)
        return best if place is None else best._replace(prototypes=outputs[place][0])


@dataclass(frozen=True)
class GraphLogits:
    """Reads a classifier's outputs; `columns` are those of the query's classes."""

    decoder: Classifier
    columns: tuple[int, ...]

    def answer(self, outputs: Outputs) -> Array:
        """The logits (N, C) of the query's classes."""
        logits = self.decoder.logits(outputs)
        if self.columns == tuple(range(logits.shape[1])):
            return logits
        return logits[:, list(self.columns)]


GraphReader = GraphBoxes | GraphLogits | RawOutputs


def choose_reader(
    head: GraphHead, decoder: str, task: str, classes: Sequence[str], where: str | Path
) -> GraphReader:
    """What reads a network's outputs for a query. Raises InputError when no decoder fits, or the classes do not."""
    if not TASKS[task].has_decoder:
        return find_outputs(head, task, len(classes), where)
    chosen = choose_decoder(decoder, head, task, len(classes), where)
    columns = choose_columns(chosen, head.metadata, classes, where)
    if isinstance(chosen, Classifier):
        return GraphLogits(chosen, columns)
    return GraphBoxes(chosen, head.size, columns)
