"""The interface of an objective: what a task's model learns from, and how far it is from that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gemel.models.predictions import TaskQuery
from gemel.models.preprocess import Preprocess


class Objective:
    """How models of one task are trained. `outputs` is whatever the model's forward returns for a batch of N frames."""

    @classmethod
    def of_query(cls, query: TaskQuery) -> Objective:
        """The objective of a query of this task."""
        return cls()

    def targets(
        self,
        labels: Sequence[Any],
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        preprocess: Preprocess | None = None,
    ) -> list[Any]:
        """Labels in the form of the loss, places as in the network's input.

        `sizes` = (width, height) of each frame before resizing; `preprocess` None squeezes the whole frame.
        """
        raise NotImplementedError

    def augment(
        self, images: Tensor, targets: list[Any] | None, generator: torch.Generator
    ) -> tuple[Tensor, list[Any] | None]:
        """A randomly changed copy of a uint8 batch (N, 3, H, W), on its own device, and its targets, None without.

        Random numbers come from a CPU generator, so they are the same on every device.
        """
        raise NotImplementedError

    def loss(self, model: nn.Module, outputs: Any, targets: list[Any]) -> Tensor:
        """Scalar loss against the labels."""
        raise NotImplementedError

    def distill(self, model: nn.Module, outputs: Any, teacher: Any) -> Tensor:
        """Scalar loss against the original's outputs on the same batch."""
        raise NotImplementedError
