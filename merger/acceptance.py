"""The only look at what proves: how far up its steps each query is taken, and whose original is back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce

from gemel.merger.checkpoint import Checkpoint, Step, StepCache, snapshot
from gemel.merger.context import MergeContext
from gemel.merger.events import Event
from gemel.merger.looks import LookFile, digest_data, digest_state
from gemel.merger.needs import can_tell
from gemel.merger.proof import error_of_look
from gemel.merger.shipped import Shipped
from gemel.merger.verdict import Trials, TriedModel, Verdict, judge_trials, may_accept
from gemel.models.errors import join_names
from gemel.models.measures.evaluation import count_flips
from gemel.models.notes import add_note

MAX_NAMES = 3
"""Queries that a reason names."""


@dataclass(frozen=True)
class Acceptance:
    """What is shipped, what is shown of each query that was tried, and the queries whose originals are back."""

    shipped: Shipped
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    originals: Sequence[str] = ()


def accept(
    ctx: MergeContext, steps: Sequence[Shipped], checkpoint: Checkpoint, queries: Sequence[str], name: str
) -> Acceptance:
    """Take each of these queries as far as it is proven, together with those that it shares weights with.

    Steps are tried in their order, from the least change on, and a query's first that does not hold is its last. With
    `accept_unproven` those hold, too, whose plain ratio on val reaches the target; they are not proven. A query that
    does not hold as it was merged gets its original back, and so does one that shares with none but those.
    """
    trials = _try_steps(ctx, steps, checkpoint, queries, name)
    verdicts = ctx.run_on_rank0(lambda: judge_trials(ctx.root.queries, trials, LookFile(ctx.workload.path)))
    first = {query: _first_step(ctx, steps, query) for query in queries}
    tops = {query: first[query] - 1 + _count_held(ctx, query, trials, verdicts) for query in queries}
    refused = sorted(query for query in queries if tops[query] < 0)
    levels = _align(steps, tops, refused)
    shown = {query: own[levels[query] - first[query]] for query, own in verdicts.items()
             if query in levels and levels[query] >= first[query]}  # fmt: skip
    shown |= {query: verdicts[query][0] for query in refused}
    _report(ctx, checkpoint, trials, shown, refused)
    parts = [steps[0].only(set(ctx.queries) - set(queries))]
    parts += [step.only(query for query, own in levels.items() if own == at) for at, step in enumerate(steps)]
    shipped = replace(reduce(Shipped.join, parts), bits=steps[-1].bits)
    alone = steps[0].merged.plan.queries() - shipped.merged.plan.queries() - set(refused)
    alone = {query for query in alone if query in queries and query not in shipped.merged.networks}
    alone = sorted(query for query in alone if not shipped.is_packed(query) and shipped.is_changed(ctx, query))
    for query in alone:
        add_note(query, "shares with no other query any more; its original is back")
    back = [*refused, *alone]
    states = {**shipped.merged.states, **{query: snapshot(ctx.originals[query]) for query in back}}
    why = _explain(steps, levels, tops, trials, verdicts)
    return Acceptance(replace(shipped, merged=replace(shipped.merged, states=states), why=why), shown, back)


def is_worth_look(ctx: MergeContext, query: str) -> bool:
    """Whether one more model of a query that was tried could be accepted, with the error of a second look."""
    return ctx.accept_unproven or can_tell(ctx.data.observe_original(query), error_of_look(1))


def _first_step(ctx: MergeContext, steps: Sequence[Shipped], query: str) -> int:
    """The first step that changes a query's original; as many as there are where none does."""
    return next((at for at, step in enumerate(steps) if step.is_changed(ctx, query)), len(steps))


def _try_steps(
    ctx: MergeContext, steps: Sequence[Shipped], checkpoint: Checkpoint, queries: Sequence[str], name: str
) -> Trials:
    """Query -> its models on what proves, up to the first that cannot hold."""
    trials: dict[str, list[TriedModel]] = {}
    going = list(queries)
    for at, step in enumerate(steps):
        changed = [query for query in going if step.is_changed(ctx, query)]
        found = ctx.for_each_query(checkpoint, Step.ACCEPTED, changed, partial(_try_model, ctx, step), str(at), name)
        for query, trial in found.items():
            trials.setdefault(query, []).append(trial)
        failing = ctx.run_on_rank0(partial(_list_failing, ctx, found))
        going = [query for query in going if query not in failing]
    return trials


def _list_failing(ctx: MergeContext, found: Mapping[str, TriedModel]) -> list[str]:
    """The queries whose models cannot be accepted."""
    looks, queries = LookFile(ctx.workload.path), ctx.root.queries
    plainly = [query for query, trial in found.items() if _holds_plainly(ctx, query, trial)]
    return [q for q, trial in found.items() if q not in plainly and not may_accept(queries[q], trial, looks)]


def _try_model(ctx: MergeContext, step: Shipped, _: StepCache, query: str) -> TriedModel:
    model, own, data = step.answerer(ctx, query), ctx.root.queries[query], ctx.data
    val, answers = data.val_answers[query], ctx.answer_val(query, model)
    return TriedModel(
        ctx.observe(query, model, answers), ctx.plain_ratio(query, answers),
        count_flips(own, val.split, val.answers, answers, val.threshold), digest_state(model.state_dict()),
        digest_data(data.footage[query], data.val[query]),
    )  # fmt: skip


def _holds_plainly(ctx: MergeContext, query: str, trial: TriedModel) -> bool:
    return ctx.accept_unproven and trial.plain >= ctx.root.queries[query].accuracy_target


def _count_held(ctx: MergeContext, query: str, trials: Trials, verdicts: Mapping[str, Sequence[Verdict]]) -> int:
    """How many of a query's models hold, one after the other."""
    held = 0
    for trial, verdict in zip(trials.get(query, ()), verdicts.get(query, ()), strict=True):
        if not (verdict.accepts or _holds_plainly(ctx, query, trial)):
            break
        held += 1
    return held


def _align(steps: Sequence[Shipped], tops: Mapping[str, int], refused: Sequence[str]) -> dict[str, int]:
    """The step of each query that is not refused: the same for all that share a weight, since they share its bits."""
    levels = dict[str, int]()
    plans = [step.merged.plan.without(*refused) for step in steps]
    for query in tops.keys() - set(refused):
        component = {query}
        for _ in tops:
            grown = {member for plan in plans for member in plan.tied_to(component)}
            if grown <= component:
                break
            component |= grown
        levels[query] = min(tops[member] for member in component & tops.keys())  # donors stay as they are
    return levels


def _report(
    ctx: MergeContext, checkpoint: Checkpoint, trials: Trials, shown: Mapping[str, Verdict], refused: Sequence[str]
) -> None:
    """What is proven, kept without proof, or refused, in the log; of refused queries a note."""
    proven = sorted(query for query, verdict in shown.items() if verdict.accepts)
    unproven = sorted(shown.keys() - {*proven, *refused})
    ends = {query: verdict.proof.lower_end for query, verdict in shown.items()}
    row = {"lower_ends": ends, "accepted": proven, "unproven": unproven, "refused": list(refused)}
    ctx.report(Event.ACCEPTED, **row)
    for query in refused:
        text = f"not proven (at least {ends[query]:.3f} of its original is): needs {shown[query].needs}"
        add_note(query, f"{text}; its original is back", _name_option(ctx, query, trials[query][0].plain))
        back = {"query": query, "repair": "original", "required": ctx.root.queries[query].accuracy_target}
        checkpoint.add_row({**back, "after": "acceptance", "flops": ctx.flops.total})
    checkpoint.add_row({**row, "flops": ctx.flops.total})


def _name_option(ctx: MergeContext, query: str, ratio: float) -> str:
    """What --accept-unproven would do with a refused query."""
    if ctx.accept_unproven:
        return f"its plain ratio on val is {ratio:.3f}"
    outcome = "would keep it" if ratio >= ctx.root.queries[query].accuracy_target else "would refuse it, too"
    return f"--accept-unproven goes by its plain ratio on val, {ratio:.3f}, and {outcome}"


def _explain(
    steps: Sequence[Shipped], levels: Mapping[str, int], tops: Mapping[str, int], trials: Trials,
    verdicts: Mapping[str, Sequence[Verdict]],
) -> dict[str, str]:  # fmt: skip
    """Query -> why it has no fewer bits, where it could have."""
    why = dict[str, str]()
    for query, level in levels.items():
        own = steps[level].why.get(query, "")
        if level + 1 < len(steps):
            bits = steps[level + 1].bits
            last = verdicts[query][-1] if query in verdicts else None
            if level < tops[query]:
                others = [name for name, at in tops.items() if at <= level and name in levels]
                own = f"{bits} would change what it shares with {join_names(sorted(others), MAX_NAMES)}"
            elif last is not None and not last.accepts:
                own = f"{bits} is not proven: needs {last.needs}; plain ratio {trials[query][-1].plain:.3f}"
            own = own or steps[level + 1].why.get(query, "")
        if own:
            why[query] = own
    return why
