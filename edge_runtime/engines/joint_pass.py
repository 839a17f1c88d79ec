"""One pass for several queries of one architecture: what they share runs once over the frames of all of them.

The module of one query runs on the frames of all queries, and every torch function in it is intercepted. A function of
tied weights runs once. A function of private weights runs for each group of queries that tie them, on its own frames; a
norm, or an element-wise function of private weights, runs once with a scale and a shift for each frame. Queries that
take the same frame share its row until their weights differ: a common prefix runs once a frame, and queries with longer
prefixes go on together after others have left. So a pass needs no format of its own: tensors of equal name are one
tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from gemel.models.out_of_memory import is_out_of_memory

Job = tuple[int, Sequence[int]]
"""The index of a member of a pass, and the rows of the batch that are its frames."""
JointForward = Callable[[Tensor, Sequence[Job]], list[Any]]
"""A normalised batch f32 (U, 3, H, W) of different frames -> for each job what `forward` gives for its frames."""

Groups = tuple[int, ...]
"""By job the first job of its group: jobs of one group had equal tensors so far."""
ELEMENTWISE = frozenset(("add", "sub", "mul", "div", "true_divide", "addcmul", "__add__", "__mul__", "__sub__",
                         "__radd__", "__rmul__", "__truediv__"))  # fmt: skip
MAX_KEPT_BATCHES = 8
"""Compositions of a batch whose scales and shifts are kept."""
EXPANSIONS = frozenset(("expand", "repeat", "expand_as", "broadcast_to"))


class JointPassError(Exception):
    """A module does something that a joint pass cannot split between queries."""


class Member:
    """One query of a pass: its module, and by state dict key the name of its tensor.

    The module can run within `ready`, which copies what all members have in common and does not stay.
    """

    def __init__(
        self, model: nn.Module, names: Mapping[str, str],
        ready: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        self.model, self.names, self.ready = model, names, ready
        self._tables: dict[str, tuple[dict[str, Any], str]] = {}
        for key in names:
            owner, _, attribute = key.rpartition(".")
            module = model.get_submodule(owner)
            is_parameter = attribute in module._parameters
            self._tables[key] = module._parameters if is_parameter else module._buffers, attribute

    def tensor(self, key: str) -> Tensor:
        """The tensor that the module uses now."""
        table, attribute = self._tables[key]
        return table[attribute]


class JointPass:
    """Runs bound modules of one architecture together. Call it within `torch.inference_mode`.

    The scales and shifts of private norms are kept, some thousand numbers a query; weights stay where they are.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        first = members[0].names
        if any(member.names.keys() != first.keys() for member in members):
            raise JointPassError("the state dicts have different keys")
        self._private = [key for key in first if len({member.names[key] for member in members}) > 1]
        self._affines: OrderedDict[tuple[int, ...], dict[str, tuple[Tensor, Tensor]]] = OrderedDict()
        self._shares_rows = True

    def __call__(self, batch: Tensor, jobs: Sequence[Job]) -> list[Any]:
        """For each job what its module gives for its rows; JointPassError where the module cannot be split."""
        together, apart = (0,) * len(jobs), tuple(range(len(jobs)))
        if self._shares_rows and len({row for _, own in jobs for row in own}) < sum(len(set(own)) for _, own in jobs):
            try:
                return self._run(batch, jobs, together)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self._shares_rows = False  # the module reads the number of its frames
        return self._run(batch, jobs, apart)

    def affine(self, path: str, eps: float, owners: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Scales and shifts (N, C) of a BatchNorm for frames of these members; `path` ends with a dot."""
        kept = self._affines.setdefault(owners, {})
        self._affines.move_to_end(owners)
        if len(self._affines) > MAX_KEPT_BATCHES:
            self._affines.popitem(last=False)
        if path not in kept:
            own = {member: _affine(self._members[member], path, eps) for member in set(owners)}
            scales, shifts = zip(*(own[member] for member in owners))
            kept[path] = torch.stack(scales), torch.stack(shifts)
        return kept[path]

    def _run(self, batch: Tensor, jobs: Sequence[Job], groups: Groups) -> list[Any]:
        mode = _Interception(self, self._members, self._private, jobs, batch.device)
        rows = mode.rows_of(groups)
        frames = [frame for own in rows.frames.values() for frame in own]
        if frames != list(range(len(batch))):
            batch = batch[torch.tensor(frames, device=batch.device)]
        _mark(batch, rows)
        template = self._members[jobs[0][0]]
        with template.ready(), mode:
            outputs = template.model(batch)
        return [pytree.tree_map_only(Tensor, lambda one, place=place: mode.pick(one, place), outputs)
                for place in range(len(jobs))]  # fmt: skip


def _affine(member: Member, path: str, eps: float) -> tuple[Tensor, Tensor]:
    """A BatchNorm in eval mode as a scale and a shift (C,)."""
    scale = torch.rsqrt(member.tensor(f"{path}running_var") + eps)
    if f"{path}weight" in member.names:
        scale = scale * member.tensor(f"{path}weight")
    shift = -scale * member.tensor(f"{path}running_mean")
    if f"{path}bias" in member.names:
        shift = shift + member.tensor(f"{path}bias")
    return scale, shift


class _Rows:
    """The rows of batched tensors: one for each frame of each group of jobs, group by group.

    `frames`: by group its different frames.
    """

    def __init__(self, groups: Groups, jobs: Sequence[Job]) -> None:
        self.groups = groups
        self.frames: dict[int, list[int]] = {}
        for group, (_, own) in zip(groups, jobs, strict=True):
            self.frames[group] = list(dict.fromkeys([*self.frames.get(group, ()), *own]))
        self.owners = tuple(group for group, own in self.frames.items() for _ in own)
        self._starts = {group: self.owners.index(group) for group in self.frames}

    def __len__(self) -> int:
        return len(self.owners)

    def find(self, job: int, frames: Sequence[int]) -> list[int]:
        """The rows that hold these frames of a job."""
        group = self.groups[job]
        return [self._starts[group] + self.frames[group].index(frame) for frame in frames]


class _Private(NamedTuple):
    """A value that differs between groups of jobs: its tensor by group, and the rows of those that are batched."""

    groups: Groups
    parts: Mapping[int, Tensor]
    rows: _Rows | None = None


def _mark(value: Any, rows: _Rows | None) -> None:
    """Note which rows a tensor, or each of several, has; attributes vanish with their tensor."""
    if isinstance(value, Tensor):
        value.joint_rows = rows  # type: ignore[attr-defined]
    elif isinstance(value, (tuple, list)):
        for one in value:
            _mark(one, rows)
    elif isinstance(value, dict):
        for one in value.values():
            _mark(one, rows)


def _rows(value: Tensor) -> _Rows | None:
    return getattr(value, "joint_rows", None)


def _refine(*given: Groups) -> Groups:
    """The groups of jobs that are together in all of these."""
    first: dict[tuple[int, ...], int] = {}
    return tuple(first.setdefault(own, job) for job, own in enumerate(zip(*given)))


class _Interception(TorchFunctionMode):
    """Intercepts the torch functions of one run."""

    def __init__(
        self, joint: JointPass, members: Sequence[Member], private: Sequence[str], jobs: Sequence[Job],
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self._joint, self._jobs, self._device = joint, jobs, device
        own = [members[member] for member, _ in jobs]
        self._template = own[0].model
        self._known: dict[Groups, _Rows] = {}
        self._private: dict[int, _Private] = {}
        """By identity, so none of these values may be freed."""
        self._keys: dict[int, str] = {}
        for key in private:
            names = [member.names[key] for member in own]
            groups = tuple(map(names.index, names))
            if any(groups):
                parts = {group: own[group].tensor(key) for group in set(groups)}
                self._private[id(parts[0])], self._keys[id(parts[0])] = _Private(groups, parts), key

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rows: _Rows | None = None
        finest, is_private, is_mixed = None, False, False
        for value in (*args, *kwargs.values()) if kwargs else args:
            for one in value if isinstance(value, (list, tuple)) else (value,):
                if not isinstance(one, Tensor):
                    continue
                found = self._private.get(id(one))
                own = _rows(one) if found is None else found.rows
                if found is not None:
                    is_private = True
                    finest = found.groups if finest is None else _refine(finest, found.groups)
                if own is not None:
                    is_mixed = is_mixed or (rows is not None and rows is not own)
                    rows = own
                    finest = own.groups if finest is None else _refine(finest, own.groups)
        if not is_private and not is_mixed:
            result = func(*args, **kwargs)
            if rows is not None:
                _mark(result, rows)
            return result
        assert finest is not None
        target = self.rows_of(finest)
        if is_private:
            return self._run_private(func, args, kwargs, target, rows is not None)
        expand = partial(self._expand, target=target)
        result = func(*_map(expand, args), **_map(expand, kwargs))
        _mark(result, target)
        return result

    def rows_of(self, groups: Groups) -> _Rows:
        """The rows of batched tensors of these groups of jobs."""
        if groups not in self._known:
            self._known[groups] = _Rows(groups, self._jobs)
        return self._known[groups]

    def pick(self, value: Tensor, place: int) -> Tensor:
        """The rows of one job in an output."""
        return self._take(value, place, self._jobs[place][1])

    def _run_private(self, func: Any, args: Any, kwargs: Any, target: _Rows, is_batched: bool) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__" or name in ("size", "dim", "numel", "is_floating_point"):
            return func(*args, **kwargs)
        if is_batched and name == "batch_norm" and id(args[0]) not in self._private:
            return self._normalise(args, kwargs, target)
        if is_batched and name in ELEMENTWISE and not kwargs and self._is_broadcast(args, target):
            result = func(*self._stack(args, target))
            _mark(result, target)
            return result
        if is_batched and name == "multi_head_attention_forward":
            return self._attend(func, args, kwargs, target)
        results = {
            group: func(*_map(take, args), **_map(take, kwargs))
            for group, take in ((one, partial(self._take, job=one, frames=own)) for one, own in target.frames.items())
        }
        if not is_batched and name in EXPANSIONS and (expanded := self._expand_private(results, target)) is not None:
            return expanded
        return self._join(results, target, is_batched)

    def _join(self, results: Mapping[int, Any], target: _Rows, is_batched: bool) -> Any:
        """The results of all groups as one value: concatenated, or private where the shapes differ."""
        first = results[0]
        if isinstance(first, (tuple, list)):
            return tuple(
                self._join({group: one[place] for group, one in results.items()}, target, is_batched)
                for place in range(len(first))
            )
        if not isinstance(first, Tensor):
            return first
        if is_batched and all(one.shape[1:] == first.shape[1:] for one in results.values()):
            joined = torch.cat(list(results.values()))
            _mark(joined, target)
            return joined
        self._private[id(first)] = _Private(target.groups, results, target if is_batched else None)
        return first

    def _expand_private(self, results: Mapping[int, Tensor], target: _Rows) -> Tensor | None:
        """Private values that the module repeats for each row of its batch, as a batched tensor; None where they are
        not."""
        rows = next((one for one in reversed(self._known.values()) if len(one) == results[0].shape[0]), None)
        if rows is None:
            return None
        finest = self.rows_of(_refine(rows.groups, target.groups))
        joined = torch.cat([
            results[target.groups[group]][rows.find(group, own)] for group, own in finest.frames.items()
        ])  # fmt: skip
        _mark(joined, finest)
        return joined

    def _normalise(self, args: Any, kwargs: Any, target: _Rows) -> Tensor:
        """BatchNorm in eval mode with a scale and a shift for each row."""
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        given = {**dict(zip(names, args)), **kwargs}
        keys = [self._keys[id(one)] for one in given.values() if id(one) in self._keys]
        if given["running_mean"] is None or given.get("training") or not keys:
            raise JointPassError("a BatchNorm has no statistics of its own")
        x = self._expand(given["input"], target)
        path = "".join(keys[0].rpartition(".")[:2])
        shape = (len(x), -1, *(1,) * (x.dim() - 2))
        owners = tuple(self._jobs[group][0] for group in target.owners)
        scale, shift = self._joint.affine(path, given.get("eps", 1e-5), owners)
        if len(x) != len(target):
            places = self._places_of(x, target)
            scale, shift = scale[places], shift[places]
        result = torch.addcmul(shift.view(shape), x, scale.view(shape))
        _mark(result, target)
        return result

    def _is_broadcast(self, args: Sequence[Any], target: _Rows) -> bool:
        """Whether private values are broadcast along the rows of the others."""
        tensors = [one for one in args if isinstance(one, Tensor)]
        private = [one for one in tensors if id(one) in self._private]
        batched = [one for one in tensors if self._is_batched(one)]
        dims = max((one.dim() for one in batched), default=0)
        return len({one.shape[0] for one in (self._expand(one, target) for one in batched)}) == 1 and all(
            self._private[id(one)].rows is None
            and (one.dim() < dims or (one.dim() == dims and one.shape[0] == 1))
            and all(part.shape == one.shape for part in self._private[id(one)].parts.values())
            for one in private
        )

    def _is_batched(self, value: Tensor) -> bool:
        """Whether a tensor has rows and is equal for all jobs of a group."""
        return id(value) not in self._private and _rows(value) is not None

    def _stack(self, args: Sequence[Any], target: _Rows) -> list[Any]:
        """The arguments with private values repeated for each row of the batched ones."""
        expanded = [one if id(one) in self._private else self._expand(one, target) for one in args]
        batched = [
            one
            for one in expanded
            if isinstance(one, Tensor) and id(one) not in self._private and _rows(one) is not None
        ]
        dims, owners = max(one.dim() for one in batched), self._owners_of(batched[0], target)
        for index, one in enumerate(expanded):
            if (found := self._private.get(id(one))) is not None:
                parts = torch.stack([found.parts[found.groups[group]] for group in target.frames])
                shape = one.shape[1:] if one.dim() == dims else (*(1,) * (dims - 1 - one.dim()), *one.shape)
                expanded[index] = parts.view(len(parts), *shape)[owners]
        return expanded

    def _attend(self, func: Any, args: Any, kwargs: Any, target: _Rows) -> Any:
        """Attention with private weights: its frames are the second axis of (T, N, C)."""

        def turn(value: Any, group: int) -> Any:
            if not isinstance(value, Tensor) or not self._is_batched(value):
                return self._take(value, group, target.frames[group])
            return self._take(_swap_axes(value), group, target.frames[group]).transpose(0, 1)

        results = [
            func(*(turn(one, group) for one in args), **{key: turn(one, group) for key, one in kwargs.items()})
            for group in target.frames
        ]
        joined = torch.cat([one[0] for one in results], dim=1)
        _mark(joined, target)
        return joined, None

    def _take(self, value: Any, job: int, frames: Sequence[int]) -> Any:
        """What these frames of a job see of a value."""
        if not isinstance(value, Tensor):
            return value
        found = self._private.get(id(value))
        if found is None:
            rows = _rows(value)
            return value if rows is None else self._select(value, rows, job, frames)
        part, own = found.parts[found.groups[job]], found.groups[job]
        if found.rows is None or list(frames) == found.rows.frames[own]:
            return part
        each = _rows_each(part, len(found.rows.frames[own]))
        return _index(part, [found.rows.frames[own].index(frame) for frame in frames], each)

    def _select(self, value: Tensor, rows: _Rows, job: int, frames: Sequence[int]) -> Tensor:
        if (regions := self._regions(value, rows)) is not None:
            if list(frames) != rows.frames[rows.groups[job]]:
                raise JointPassError("regions belong to frames of several queries")
            owners = torch.tensor(rows.owners, device=self._device)
            return value[owners[regions] == rows.groups[job]]
        return _index(value, rows.find(job, frames), _rows_each(value, len(rows)))

    def _expand(self, value: Any, target: _Rows) -> Any:
        """A batched tensor with the rows of finer groups."""
        rows = _rows(value) if isinstance(value, Tensor) else None
        if rows is None or rows is target:
            return value
        if self._regions(value, rows) is not None:
            raise JointPassError("regions belong to frames of several queries")
        each = _rows_each(value, len(rows))
        if len(rows) == each == 1:
            result = value.expand(len(target), *value.shape[1:])
        else:
            places = [row for group, own in target.frames.items() for row in rows.find(group, own)]
            result = _index(value, places, each)
        _mark(result, target)
        return result

    def _regions(self, value: Tensor, rows: _Rows) -> Tensor | None:
        """The row of each region where the rows of a value are regions, which a detector of two stages notes."""
        regions = getattr(self._template, "region_frames", None)
        if regions is None or not len(regions) == value.shape[0] != len(rows):
            return None
        return regions.long()

    def _places_of(self, value: Tensor, rows: _Rows) -> Tensor:
        """The place among these rows of each row of a batched tensor: of windows of attention, and of regions."""
        if (regions := self._regions(value, rows)) is not None:
            return regions
        return torch.arange(len(rows), device=value.device).repeat_interleave(_rows_each(value, len(rows)))

    def _owners_of(self, value: Tensor, rows: _Rows) -> Tensor:
        """The place of the group of each row of a batched tensor among all groups."""
        order = list(rows.frames)
        owners = torch.tensor([order.index(group) for group in rows.owners], device=value.device)
        return owners if len(value) == len(rows) else owners[self._places_of(value, rows)]


def _map(change: Callable[[Tensor], Any], value: Any) -> Any:
    """The arguments of a torch function with every tensor changed; pytree does the same in four times the time."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_map(change, one) for one in value)
    if type(value) is dict:
        return {key: _map(change, one) for key, one in value.items()}
    return value


def _rows_each(value: Tensor, count: int) -> int:
    """The rows of each of so many frames (windows of attention are several)."""
    each, rest = divmod(value.shape[0], count) if value.dim() else (0, 1)
    if rest or not each:
        raise JointPassError(f"a tensor {tuple(value.shape)} has no rows of {count} frames")
    return each


def _index(value: Tensor, places: Sequence[int], each: int) -> Tensor:
    """The rows at these places, each of them several rows of the tensor."""
    if list(places) == list(range(places[0], places[0] + len(places))):
        return value[places[0] * each : (places[0] + len(places)) * each]
    index = [place * each + one for place in places for one in range(each)]
    return value[torch.tensor(index, device=value.device)]


def _swap_axes(value: Tensor) -> Tensor:
    turned = value.transpose(0, 1)
    _mark(turned, _rows(value))
    return turned
