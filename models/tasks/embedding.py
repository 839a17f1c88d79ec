"""Embedding: a vector for each frame, of which only the direction counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gemel.models.measures.evidence import ShownAnswers
from gemel.models.predictions import EmbeddingPrediction, IdentityLabel, Task, join_shapes
from gemel.models.preprocess import Preprocess

ROWS_AT_ONCE = 1024
MIN_LENGTH = 1e-12
"""Shorter vectors have no direction."""


class Embedding(Task):
    """A vector for each frame, of which only the direction counts.

    The model's outputs are vectors (N, D).

    Against labels recall@1: the fraction of frames whose nearest neighbour by cosine is of their identity. Its frames
    of the same clip or track are no neighbours, where it is in another one, too (as in re-identification).
    Against the original's answers the mean cosine with them.
    """

    name = "embedding"
    answer, layout = "embedding", "identities"
    metric, agreement = "recall_at_1", "cosine_agreement"
    footage = "frames of two identities or more, each in several clips or tracks"

    def predictions(
        self,
        reader: None,
        outputs: np.ndarray,
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        min_score: float = 0.0,
        preprocess: Preprocess | None = None,
    ) -> list[EmbeddingPrediction]:
        """The vectors, of length 1."""
        lengths = np.linalg.norm(outputs, axis=1, keepdims=True)
        return [EmbeddingPrediction(vector) for vector in outputs / lengths.clip(MIN_LENGTH)]

    def tallies(
        self,
        predictions: Sequence[EmbeddingPrediction | None],
        labels: Sequence[IdentityLabel] | Sequence[EmbeddingPrediction],
        classes: Sequence[str],
        threshold: float = 0.0,
    ) -> np.ndarray:
        """f64 (N, 2): right neighbours and frames that have one; or cosines (at least 0) and 1."""
        if any(isinstance(label, IdentityLabel) for label in labels):
            return _count_neighbours(predictions, labels)  # type: ignore[arg-type]
        pairs = zip(predictions, labels, strict=True)
        cosines = [
            # The labels are vectors too: identities were taken above.
            0.0 if prediction is None else max(0.0, float(prediction.vector @ label.vector))  # type: ignore[union-attr]
            for prediction, label in pairs
        ]
        return np.stack([np.minimum(cosines, 1.0), np.ones(len(labels))], axis=1)

    def metric_of(self, total: np.ndarray) -> float:
        """The mean."""
        return float(total[0] / total[1]) if total[1] else 0.0

    def labels_of(
        self, prediction: EmbeddingPrediction, threshold: float, label: IdentityLabel | None = None
    ) -> EmbeddingPrediction:
        """The vector."""
        return prediction

    def answers(
        self, label: IdentityLabel | EmbeddingPrediction, classes: Sequence[str]
    ) -> tuple[str, ...]:
        """The identity, where it is known."""
        return (label.identity,) if isinstance(label, IdentityLabel) else ()

    def find_gap(
        self, labels: Sequence, classes: Sequence[str], shown: ShownAnswers, target: float
    ) -> str:
        """So many frames with a possible neighbour, of two identities; or vectors that are not all alike."""
        if any(isinstance(label, IdentityLabel) for label in labels):
            several = [count for count in shown.samples().values() if count > 1]
            if len(several) < 2:
                return f"{shown.name} shows {len(several)} identities more than once; 2 are needed"
            if (total := sum(several)) < (min_samples := shown.config.min_samples):
                return f"{shown.name} holds {total} frames of identities shown more than once; {min_samples} are needed"
            return ""
        mean = np.mean([label.vector for label in labels], axis=0) if labels else np.zeros(1)
        constant = EmbeddingPrediction(mean / max(float(np.linalg.norm(mean)), 1e-12))
        return self.constant_gap(constant, labels, shown, target)

    def find_misfit(self, shapes: Sequence[tuple[int, ...]], width: int) -> str:
        """One vector (1, D)."""
        if len(shapes) == 1 and len(shapes[0]) == 2:
            return ""
        return f"answers one frame with {join_shapes(shapes)}, not with a vector (1, D)"


def _count_neighbours(
    predictions: Sequence[EmbeddingPrediction | None], labels: Sequence[IdentityLabel]
) -> np.ndarray:
    """Right neighbours and frames that have one, f64 (N, 2)."""
    answered = np.array([prediction is not None for prediction in predictions])
    width = max(
        (len(prediction.vector) for prediction in predictions if prediction is not None), default=1
    )
    vectors = np.stack(
        [
            np.zeros(width, np.float32) if prediction is None else prediction.vector
            for prediction in predictions
        ]
    )
    identities, units = (
        np.unique([getattr(label, key) for label in labels], return_inverse=True)[1]
        for key in ("identity", "unit")
    )
    counts = np.zeros((len(labels), 2))
    for rows in np.array_split(np.arange(len(labels)), -(-len(labels) // ROWS_AT_ONCE)):
        is_same = identities[rows, None] == identities
        elsewhere = is_same & (units[rows, None] != units)
        itself = rows[:, None] == np.arange(len(labels))
        near = np.where(elsewhere.any(axis=1, keepdims=True), is_same & ~elsewhere, itself)
        cosines = np.where(near | ~answered, -np.inf, vectors[rows] @ vectors.T)
        counts[rows, 1] = (is_same & ~near).any(axis=1)
        nearest = identities[cosines.argmax(axis=1)] == identities[rows]
        counts[rows, 0] = (
            nearest & answered[rows] & (counts[rows, 1] > 0) & np.isfinite(cosines.max(axis=1))
        )
    return counts
