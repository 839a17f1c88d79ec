"""Runs of several queries: the frames of all of them in one batch, each picture once, and an answer for each query."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gemel.edge_runtime.engines.base import CHECKED_FRAMES, JointPredictions, no_op
from gemel.edge_runtime.engines.joint_pass import Job, JointForward
from gemel.edge_runtime.engines.tensor_engine import TensorEngine
from gemel.edge_runtime.frames.part_times import PART_TIMES, Part
from gemel.models.errors import message_of
from gemel.models.out_of_memory import is_out_of_memory
from gemel.models.predictions import Prediction
from gemel.models.tensors import normalise_frames

TOLERANCE = 1e-3
"""The largest difference from separate runs, as a fraction of the largest value: another order of sums, not other
frames."""
MAX_OTHER_SHARE = 0.05
"""Share of outputs that may differ more: regions of nearly equal scores change places by rounding."""

log = logging.getLogger("gemel.run")


class JointRunner:
    """Runs queries that one pass can serve (`models.sharing.passes`), by the engines they are bound to."""

    def __init__(self, engines: Mapping[str, TensorEngine]) -> None:
        self._engines = dict(engines)
        self._members = {query: place for place, query in enumerate(engines)}
        self._forward: JointForward | None = None

    @torch.inference_mode()
    def run(self, frames: Mapping[str, Sequence[np.ndarray]], beside: Callable[[], object] = no_op) -> JointPredictions:
        """Predictions of each query for its RGB frames (H, W, 3), or the error with which that query failed.

        One query's bad frame leaves the others' answers; where the pass itself fails, each query runs alone. Raises
        what running out of memory raises.
        """
        answers: JointPredictions = {}
        pictures: list[np.ndarray] = []
        rows: dict[tuple[object, ...], int] = {}
        jobs: dict[str, list[int]] = {}
        for query, own in frames.items():
            engine = self._engines[query]
            try:
                before = len(pictures)
                for frame in own:
                    key = id(frame), engine.query.region
                    if key not in rows:
                        pictures.append(engine.resize(frame))
                        rows[key] = len(pictures) - 1
                jobs[query] = [rows[id(frame), engine.query.region] for frame in own]
            except Exception as error:
                answers[query] = error
                del pictures[before:]
                rows = {key: row for key, row in rows.items() if row < before}
        if jobs:
            first = self._engines[next(iter(jobs))]
            batch = normalise_frames(first.query.preprocess, first.upload(np.stack(pictures)))
            beside()
            answers |= self._answer(batch, jobs, frames)
        return answers

    def differs(self, frames: Mapping[str, np.ndarray]) -> str | None:
        """How joint outputs differ from those of separate runs on noise of these frames' sizes; None where they agree.

        Queries with one view are compared on frames of their own and on common ones.
        """
        noise, batch = np.random.default_rng(0), list[np.ndarray]()
        try:
            for query, frame in frames.items():
                own = (noise.integers(0, 256, frame.shape, np.uint8) for _ in range(CHECKED_FRAMES))
                batch += map(self._engines[query].resize, own)
            rows = [range(start, start + CHECKED_FRAMES) for start in range(0, len(batch), CHECKED_FRAMES)]
            differing = self._differing(batch, dict(zip(frames, rows, strict=True)))
            views = {self._engines[query].query.view for query in frames}
            if differing is None and len(views) < len(frames):
                differing = self._differing(batch[:CHECKED_FRAMES], dict.fromkeys(frames, rows[0]))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return message_of(error)
        return None if differing is None else f"query {differing} gets other outputs than alone"

    @torch.inference_mode()
    def _differing(self, batch: Sequence[np.ndarray], rows: Mapping[str, range]) -> str | None:
        """The first query whose joint outputs for these rows differ from those of a separate run."""
        first = self._engines[next(iter(rows))]
        pictures = normalise_frames(first.query.preprocess, first.upload(np.stack(batch)))
        joint = self._run_joint(pictures, [(self._members[query], own) for query, own in rows.items()])
        for (query, own), found in zip(rows.items(), joint, strict=True):
            if not _agree(found, self._engines[query].forward(pictures[own.start : own.stop])):
                return query
        return None

    def _answer(
        self, batch: Tensor, jobs: Mapping[str, Sequence[int]], frames: Mapping[str, Sequence[np.ndarray]]
    ) -> JointPredictions:
        try:
            outputs = self._run_joint(batch, [(self._members[query], rows) for query, rows in jobs.items()])
        except Exception as error:
            if is_out_of_memory(error):
                raise
            log.debug("a joint pass failed: %s", error)
            return {query: self._run_alone(query, frames[query]) for query in jobs}
        answers: JointPredictions = {}
        for query, found in zip(jobs, outputs, strict=True):
            try:
                answers[query] = self._engines[query].predictions(found, frames[query])
            except Exception as error:
                answers[query] = error
        return answers

    def _run_joint(self, batch: Tensor, jobs: Sequence[Job]) -> list[object]:
        if self._forward is None:
            engines = list(self._engines.values())
            self._forward = type(engines[0]).join(engines)
        if self._forward is None:
            raise NotImplementedError(f"engine {next(iter(self._engines.values())).name} has no joint pass")
        with PART_TIMES.count(Part.RUN):
            return self._forward(batch, jobs)

    def _run_alone(self, query: str, frames: Sequence[np.ndarray]) -> list[Prediction] | Exception:
        try:
            return self._engines[query].run(frames)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return error


def _agree(found: object, expected: object) -> bool:
    pairs = list(zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True))
    for one, other in pairs:
        if not isinstance(one, Tensor):
            continue
        if one.shape != other.shape:
            return False
        if one.is_floating_point() and one.numel():
            scale = float(other.abs().max()) or 1.0
            if not float(((one - other).abs() <= TOLERANCE * scale).float().mean()) >= 1 - MAX_OTHER_SHARE:
                return False
    return True
