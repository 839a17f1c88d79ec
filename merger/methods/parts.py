"""Whose model begins as a part of whose, how well that answers its own question, and who needs no training for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from merger.checkpoint import Checkpoint, State, snapshot, snapshots
from merger.core.budget import Budget
from merger.core.context import CALIBRATION_FRAMES, MergeContext
from merger.core.merged import Merged
from merger.core.snapshot import evaluate_all
from merger.start.standing_in import standing_in
from models.sharing.plan import SharingPlan

LEAST = 0.25
"""Nobody gives who has less than this part of the bytes that a query could take."""
GIVERS = 3
"""So many models are tried as a query's giver at most, those first that have most to give."""


@dataclass(frozen=True)
class Part:
    """How a query begins as a part of its `giver`: `pairs` path -> the giver's path, its state, its `ratio` on val."""

    giver: str
    pairs: Mapping[str, str]
    state: State
    ratio: float


@dataclass(frozen=True)
class Parts:
    """Models of a workbench as parts of each other, of what a `plan` says that can be shared."""

    ctx: MergeContext
    plan: SharingPlan
    required: Mapping[str, float]
    checkpoint: Checkpoint
    budget: Budget

    def largest_first(self) -> list[str]:
        """The queries of the plan by the bytes of their layers, those too that nobody shares yet."""
        size = dict.fromkeys(sorted(self.plan.queries()), 0)
        for layer in self.ctx.layers:
            if layer.query in size and not layer.head:
                size[layer.query] += layer.bytes
        return sorted(size, key=lambda query: -size[query])

    def takeable(self, query: str) -> dict[str, int]:
        """Path -> bytes of the layers of a query that are to be shared."""
        size = {layer.path: layer.bytes for layer in self.ctx.layers if layer.query == query}
        return {path: size[path] for members in self.plan.shared for name, path in members if name == query}

    def one_question(self, query: str, other: str) -> bool:
        """Whether two queries tell the same classes in the same way, so that one's head answers for both."""
        mine, theirs = self.ctx.queries[query], self.ctx.queries[other]
        return (mine.task, list(mine.classes)) == (theirs.task, list(theirs.classes))

    def best(self, query: str, givers: Sequence[str], states: Mapping[str, State]) -> Part | None:
        """The giver, of those that stand in these `states`, as a part of which a query begins best on val."""
        size, found = self.takeable(query), dict[str, tuple[dict[str, str], State]]()
        wide = {(layer.query, layer.path): layer.wide for layer in self.ctx.layers if not layer.head}
        for giver in givers:
            modules = standing_in(self.ctx.originals[query], self.ctx.originals[giver])
            pairs = {
                path: theirs for path, theirs in modules.items()
                if path in size and (giver, theirs) in wide and wide[giver, theirs] == wide[query, path]
            }  # fmt: skip
            if sum(size[path] for path in pairs) >= LEAST * sum(size.values()):
                found[giver] = pairs, self.state(query, giver, modules, states[giver])
        most = sorted(found, key=lambda giver: -sum(size[path] for path in found[giver][0]))[:GIVERS]
        begun = [Part(giver, *self._evaluated(query, giver, *found[giver])) for giver in most]
        return max(begun, key=lambda part: part.ratio, default=None)

    def state(self, query: str, giver: str, modules: Mapping[str, str], theirs: State) -> State:
        """The query's model as a part of its giver: all that stands in, heads only where both tell the same classes."""
        heads = {layer.path for layer in self.ctx.layers if layer.query == query and layer.head}
        alike = self.one_question(query, giver)
        paths = {path: there for path, there in modules.items() if alike or path not in heads}
        state = dict(self.ctx.originals[query].state_dict())
        for key in state:
            path, _, name = key.rpartition(".")
            if path in paths:
                state[key] = theirs[f"{paths[path]}.{name}" if paths[path] else name]
        return {key: tensor.detach().to("cpu", copy=True) for key, tensor in state.items()}

    def answered(self) -> Merged:
        """What is merged where a part of one model answers another's question as it is; the plan may be empty.

        Of each question the largest model gives first. The log has a row for each query that takes.
        """
        merged, givers = Merged(SharingPlan(), {}), list[str]()
        originals = snapshots({query: self.ctx.originals[query] for query in self.largest_first()})
        for query in originals:
            alike = [giver for giver in givers if self.one_question(query, giver)]
            if alike and self.checkpoint.step(f"over before {query}", lambda: self.budget.over):
                break
            part = self.best(query, alike, originals)
            if part is None or part.ratio < self.required[query]:
                givers.append(query)
                continue
            plan = merged.plan.with_pairs([(part.giver, part.pairs[path]), (query, path)] for path in part.pairs)
            merged = Merged(plan, {**merged.states, part.giver: originals[part.giver], query: part.state})
            row = self.row(query, part.giver, list(part.pairs), part.ratio, 0, plan)
            self.ctx.progress("takes", **{**row, "layers": len(part.pairs)})
            self.checkpoint.add_row(row)
        return merged

    def row(
        self, query: str, giver: str, layers: Sequence[str], ratio: float, epochs: int, accepted: SharingPlan
    ) -> dict[str, Any]:
        """The log's row of a query that takes these layers, with the plan that is `accepted` then."""
        return {
            "takes": query, "from": giver, "layers": layers, "ratio": ratio, "required": self.required[query],
            "epochs": epochs, "accepted": ratio >= self.required[query],
            "accepted_bytes": accepted.saved_bytes(self.ctx.layers), "flops": self.ctx.flops.total,
        }  # fmt: skip

    def _evaluated(
        self, query: str, giver: str, pairs: dict[str, str], state: State
    ) -> tuple[dict[str, str], State, float]:
        """The pairs, the state with the norms that serve it better, and the ratio with these."""
        model = self.ctx.models([query], {query: state})[query]
        name = f"{query} as a part of {giver}"
        ratios = evaluate_all(self.ctx, self.checkpoint, name, {query: model}, SharingPlan(), CALIBRATION_FRAMES)
        return pairs, snapshot(model), ratios[query]
