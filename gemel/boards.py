"""`gemel profile --share`: one row for the table of boards, of what was measured on this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemel.conditions import MEASURED, Conditions, machine_memory_bytes
from gemel.text import percent, size

if TYPE_CHECKING:
    from gemel.models.bundle import Bundle
    from gemel.profiler import ProfileResult

HEAD = "| processor | memory | queries | memory of the box | frames in time |"
MAX_MODELS = 3
"""Models that a row names."""


@dataclass(frozen=True)
class BoardRow:
    """A row of docs/boards.md.

    `box_bytes` is the memory (PSS) of a process with all queries of the bundle on one thread, None where the bundle
    does not run in ONNX Runtime on the processor; `in_time` the part of the frames that a simulated minute with the
    measured costs answers in time.
    """

    processor: str
    cores: int
    memory_bytes: int
    queries: str
    box_bytes: int | None
    in_time: float

    def to_text(self) -> str:
        """The row in Markdown below the table's head."""
        box = "-" if self.box_bytes is None else size(self.box_bytes)
        board = f"{self.processor}, {self.cores} cores"
        return f"{HEAD}\n| {board} | {size(self.memory_bytes)} | {self.queries} | {box} | {percent(self.in_time, 0)} |"


def make_row(bundle: Bundle, result: ProfileResult, factories: Sequence[str] = ()) -> BoardRow:
    """The row of a bundle that was just profiled; measures its memory in a process of its own."""
    from gemel.edge_runtime.engines.base import ONNX
    from gemel.packing import PACKED, measure
    from gemel.planner import plan_box

    profile = result.profile
    runs_here = profile.device == "cpu" and all(one.engine == ONNX for one in profile.queries.values())
    memory = machine_memory_bytes()
    plan = plan_box(bundle.path, Conditions(str(memory), device=MEASURED, factories=tuple(factories)))
    return BoardRow(
        str(profile.machine["name"]), int(profile.machine["cores"]), memory, describe_queries(bundle),
        measure(PACKED, {"bundle": str(bundle.path.absolute())}).pss_bytes if runs_here else None, plan.in_time,
    )  # fmt: skip


def describe_queries(bundle: Bundle) -> str:
    """`12 detection of 416 x 416 at 5 a second` for each kind of query."""
    from gemel.planner import DEFAULT_FPS

    kinds = Counter(
        f"{query.task} of {' x '.join(map(str, query.preprocess.size[::-1]))} at {query.fps or DEFAULT_FPS:g} a second"
        for query in bundle.queries
    )
    texts = [f"{count} {kind}" for kind, count in kinds.most_common(MAX_MODELS)]
    rest = sum(kinds.values()) - sum(count for _, count in kinds.most_common(MAX_MODELS))
    return ", ".join(texts) + (f" and {rest} more" if rest else "")
