"""Training models that lie in several processes: the joint training's steps, whoever computes which part of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from merger.distributed import GradReducer, ProcessGroup, SharedParam
from merger.training.loop import MAX_GRADIENT_NORM, Diverged, Training, numbers
from merger.training.step_config import REMEDY, StepConfig
from models.device import empty_caches, is_out_of_memory
from models.errors import InputError
from models.sharing.layers import weight_of
from models.sharing.plan import Member, SharingPlan

Sets = Sequence[tuple[Member, ...]]


@dataclass(frozen=True)
class Team:
    """Who trains together: everyone's queries in order, and the sets of layers that share one weight.

    The sets come in the order in which a backward pass reaches them (`backwards`).
    """

    crew: ProcessGroup
    everyone: Sequence[str]
    sets: Sets

    def crossing(self) -> list[tuple[tuple[Member, ...], tuple[int, ...]]]:
        """The sets that stand in several processes, and the ranks of these."""
        found = []
        for members in self.sets:
            ranks = tuple(sorted({self.crew.owner(query) for query in self.users(members)}))
            if len(ranks) > 1:
                found.append((members, ranks))
        return found

    def users(self, members: Sequence[Member]) -> set[str]:
        """Those of everyone who have a layer in this set."""
        return {query for query, _ in members if query in self.everyone}

    def here(self, models: Mapping[str, nn.Module]) -> dict[int, Crossing]:
        """The weights of this process's models that others have, too, by the ids of the parameters."""
        found = {}
        for members, ranks in self.crossing():
            if self.crew.rank in ranks:
                query, path = next(member for member in members if member[0] in models)
                owner, name = weight_of(models[query], path)
                weight = getattr(owner, name)
                found[id(weight)] = Crossing(members, ranks, weight, ranks[0] == self.crew.rank)
        return found


@dataclass(frozen=True)
class Crossing:
    """A weight that several processes have: its set, their ranks, the parameter here, and whether this one leads.

    Whoever leads tells of it where it must be told once.
    """

    members: tuple[Member, ...]
    ranks: tuple[int, ...]
    weight: nn.Parameter
    leads: bool


class SpreadTraining(Training):
    """A `Training` of everyone's models of which this process has its own.

    It gives what one process with all of them would, but for the order in which floats are added. Only gradients of
    weights that stand in several processes are summed (`merger.distributed`); beside them travel, each step, the square
    of the gradient's norm, the loss, and whether it is a number. Every model has a teacher. Shared weights must begin
    alike everywhere.
    """

    def __init__(self, team: Team, models: Mapping[str, nn.Module], *args: Any, **named: Any) -> None:
        self._team, self._crew = team, team.crew
        for ranks in dict.fromkeys(ranks for _, ranks in team.crossing()):
            self._crew.link.meet(ranks)
        self._here = team.here(models)
        super().__init__(models, *args, **named)
        trained = [one for one in self._here.values() if one.weight.requires_grad]
        self._sums = GradReducer(self._crew.link, [SharedParam(one.weight, one.ranks) for one in trained])
        self._users = [team.users(one.members) for one in trained]

    def state_dict(self) -> dict[str, Any]:
        """The state of the whole training in the first process, as one process would have it; others get their part."""
        own = super().state_dict()
        states = gathered(self._team, self.models, to=0)
        named = dict(self._named_parameters())
        moments = _joined(self._team, self.models, {name: (id(named[name]), own["moments"][name]) for name in named}, 0)
        return {**own, "models": states, "moments": moments}

    def _everyone(self) -> list[str]:
        return list(self._team.everyone)

    def _taught(self) -> bool:
        return True

    def _shared(self) -> tuple[set[int], bool]:
        here, _ = super()._shared()
        return here | self._here.keys(), any(len(self._team.users(members)) > 1 for members in self._team.sets)

    def _next_layout(self) -> StepConfig:
        found = self._crew.run_on_rank0(super()._next_layout)  # what cannot be is told once
        assert self.fitting is not None
        self.fitting.take(found)
        return found

    def _learn_all(self) -> None:
        counts = {query: self._batches.count(query, self.step) for query in self.everyone}
        nodes = {query: len(self._batches.nodes(query, self.step)) for query in self.models}
        passes = [sum(nodes.get(query, 0) for query in users) for users in self._users]
        self._sums.begin(passes, [not any(counts[query] for query in users) for users in self._users])
        losses: dict[str, Tensor] = {}

        def learn() -> None:
            for query, found in self._batches.at(self.step).items():
                losses[query] = self._learn(query, found)

        full = self._is_full(learn)
        if full:  # the others wait for this one's sums, and must hear of it
            self.optimiser.zero_grad(set_to_none=True)
            empty_caches()
        self._sum_up()
        full = full or self._is_full(self._make_moments)
        own = [p for group in self.optimiser.param_groups for p in group["params"]]
        counted = [p.grad for p in own if p.grad is not None and (id(p) not in self._here or self._here[id(p)].leads)]
        *values, length = numbers([*losses.values(), nn.utils.get_total_norm(counted).to(self.device)])
        lost = ", ".join(query for query, loss in zip(losses, values) if not math.isfinite(loss))
        told = [length**2, sum(values), float(bool(lost)), float(full)]
        square, loss, failed, anyone_full = self._crew.link.numbers(told)
        if anyone_full:
            raise torch.OutOfMemoryError("the memory of one of the processes is full")
        norm = torch.tensor(square).sqrt()
        if failed or not torch.isfinite(norm):
            names = [name for name in self._crew.link.gather(lost, None) if name]
            raise Diverged(", ".join(names or self.everyone))
        self._losses += loss
        self._summed += sum(map(bool, counts.values()))
        self._crew.steps += 1
        nn.utils.clip_grads_with_norm_(own, MAX_GRADIENT_NORM, norm.to(torch.float32))

    def _is_full(self, do: Callable[[], None]) -> bool:
        """Whether there was too little memory to do this, where something can still be done about it."""
        try:
            do()
        except Exception as error:
            if self.fitting is None or not is_out_of_memory(error):
                raise
            return True
        return False

    def _sum_up(self) -> None:
        """Put the sums in the gradients. Without memory for these no process can go on."""
        try:
            self._crew.given += self._sums.finish()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise InputError("the memory", "has no room for the gradients that processes share", REMEDY) from error


def gathered(team: Team, models: Mapping[str, nn.Module], to: int | None = None) -> dict[str, dict[str, Tensor]]:
    """The states of the models of all processes, in the processor's memory, everywhere or in one of them.

    A weight that is shared travels once, and stands there once.
    """
    rows: dict[str, tuple[int, Tensor]] = {}
    for query, model in models.items():
        trained = dict(model.named_parameters(remove_duplicate=False))
        for name, tensor in model.state_dict().items():
            rows[f"{query}/{name}"] = (id(trained.get(name)), tensor)
    states: dict[str, dict[str, Tensor]] = {}
    for key, tensor in _joined(team, models, rows, to).items():
        query, name = key.split("/", 1)
        states.setdefault(query, {})[name] = tensor
    return {query: states[query] for query in sorted(states)}


def _joined(
    team: Team, models: Mapping[str, nn.Module], rows: Mapping[str, tuple[int, Any]], to: int | None
) -> dict[str, Any]:
    """Name -> value over all processes; here rows are name -> (the parameter's id, value).

    Of a weight that several processes have the one that leads tells.
    """
    here = team.here(models)
    things = {name: here[key].members if key in here else (name,) for name, (key, _) in rows.items()}
    values = {things[name]: value for name, (key, value) in rows.items() if key not in here or here[key].leads}
    everyones = team.crew.link.gather((things, values), to)
    known = {thing: value for _, own in everyones for thing, value in own.items()}
    return {name: known[thing] for own, _ in everyones for name, thing in own.items()}


def backwards(plan: SharingPlan, position: Mapping[Member, float]) -> Sets:
    """The sets of a plan, those first that a backward pass reaches first: the layers nearest the output."""
    mean = {members: sum(position.get(member, 0.0) for member in members) / len(members) for members in plan.shared}
    return sorted(plan.shared, key=lambda members: -mean[members])
