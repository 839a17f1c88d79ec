"""One pass for several queries of one architecture: what they share runs once over the frames of all of them.

The module of one query runs on the frames of all queries, and every torch function in it is intercepted. A function of
tied weights runs once. A function of private weights runs for each query on its own frames; a norm, or an element-wise
function of private weights, runs once with a scale and a shift for each frame. Queries that take the same frame share
its row until the first private weight: a common prefix runs once a frame. So a pass needs no format of its own: tensors
of equal name are one tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from models.device import is_out_of_memory

Job = tuple[int, Sequence[int]]
"""The index of a member of a pass, and the rows of the batch that are its frames."""
JointForward = Callable[[Tensor, Sequence[Job]], list[Any]]
"""A normalised batch f32 (U, 3, H, W) of different frames -> for each job what `forward` gives for its frames."""

FRAMES, SAMPLES = "frames", "samples"
"""A batched tensor has a row for each frame, or for each frame of each query."""
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
        rows = [row for _, own in jobs for row in own]
        if self._shares_rows and len(rows) > len(batch):
            try:
                return self._run(batch, jobs, rows)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self._shares_rows = False  # the module reads the number of its frames
        if rows != list(range(len(batch))):
            batch = batch[torch.tensor(rows, device=batch.device)]
        starts = [sum(len(own) for _, own in jobs[:place]) for place in range(len(jobs) + 1)]
        placed = [(member, range(starts[place], starts[place + 1])) for place, (member, _) in enumerate(jobs)]
        return self._run(batch, placed, list(range(len(batch))))

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

    def _run(self, batch: Tensor, jobs: Sequence[Job], rows: Sequence[int]) -> list[Any]:
        mode = _Interception(self, self._members, self._private, jobs, rows, len(batch), batch.device)
        template = self._members[jobs[0][0]]
        _mark(batch, SAMPLES if list(rows) == list(range(len(batch))) else FRAMES)
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


def _mark(value: Any, kind: str | None) -> None:
    """Note which rows a tensor, or each of several, has; attributes vanish with their tensor."""
    if isinstance(value, Tensor):
        value.joint_rows = kind  # type: ignore[attr-defined]
    elif isinstance(value, (tuple, list)):
        for one in value:
            _mark(one, kind)
    elif isinstance(value, dict):
        for one in value.values():
            _mark(one, kind)


class _Interception(TorchFunctionMode):
    """Intercepts the torch functions of one run. A private value has a tensor for each job (`_parts`)."""

    def __init__(
        self, joint: JointPass, members: Sequence[Member], private: Sequence[str], jobs: Sequence[Job],
        rows: Sequence[int], frames: int, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self._joint, self._jobs, self._rows, self._frames = joint, jobs, rows, frames
        own = [members[member] for member, _ in jobs]
        self._template = own[0].model
        self._starts = [0, *accumulate(len(rows) for _, rows in jobs)]
        self._owners = tuple(member for member, rows in jobs for _ in rows)
        self._places = torch.tensor([place for place, (_, rows) in enumerate(jobs) for _ in rows], device=device)
        self._parts: dict[int, list[Tensor]] = {}
        self._keys: dict[int, str] = {}
        self._alive: list[Tensor] = []
        """Private values are found by identity, so none of them may be freed."""
        for key in private:
            if len({member.names[key] for member in own}) > 1:
                parts = [member.tensor(key) for member in own]
                self._parts[id(parts[0])], self._keys[id(parts[0])] = parts, key

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind, is_private, is_mixed = None, False, False
        for value in (*args, *kwargs.values()) if kwargs else args:
            for one in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(one, Tensor):
                    if id(one) in self._parts:
                        is_private = True
                    elif (found := getattr(one, "joint_rows", None)) is not None:
                        is_mixed = is_mixed or kind not in (None, found)
                        kind = SAMPLES if SAMPLES in (kind, found) else found
        if not is_private and not is_mixed:
            result = func(*args, **kwargs)
            if kind is not None:
                _mark(result, kind)
            return result
        if is_private:
            return self._run_private(func, args, kwargs, kind)
        result = func(*pytree.tree_map(self._expand, args), **pytree.tree_map(self._expand, kwargs))
        _mark(result, SAMPLES)
        return result

    def pick(self, value: Tensor, place: int) -> Tensor:
        """The rows of one job in an output."""
        if id(value) in self._parts:
            return self._parts[id(value)][place]
        kind = getattr(value, "joint_rows", None)
        return value if kind is None else self._part(value, place, kind)

    def _run_private(self, func: Any, args: Any, kwargs: Any, kind: str | None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__" or name in ("size", "dim", "numel", "is_floating_point"):
            return func(*args, **kwargs)
        if kind is not None and name == "batch_norm" and id(args[0]) not in self._parts:
            return self._normalise(args, kwargs)
        if kind is not None and name in ELEMENTWISE and not kwargs and self._is_broadcast(args):
            result = func(*self._stack(args))
            _mark(result, SAMPLES)
            return result
        if kind is not None and name == "multi_head_attention_forward":
            return self._attend(func, args, kwargs)
        results = [
            func(*pytree.tree_map(take, args), **pytree.tree_map(take, kwargs))
            for take in (partial(self._take, place=place) for place in range(len(self._jobs)))
        ]
        if kind is None and name in EXPANSIONS and results[0].shape[0] == len(self._rows):
            joined = torch.stack([results[place][row] for row, place in enumerate(self._places)])
            _mark(joined, SAMPLES)
            return joined
        return self._join(results, kind is not None)

    def _join(self, results: list[Any], is_batched: bool) -> Any:
        """The results of all jobs as one value: concatenated, or private where the shapes differ."""
        first = results[0]
        if isinstance(first, (tuple, list)):
            return tuple(self._join([one[place] for one in results], is_batched) for place in range(len(first)))
        if not isinstance(first, Tensor):
            return first
        if is_batched and all(one.shape[1:] == first.shape[1:] for one in results):
            joined = torch.cat(results)
            _mark(joined, SAMPLES)
            return joined
        self._parts[id(first)] = results
        self._alive += results
        return first

    def _normalise(self, args: Any, kwargs: Any) -> Tensor:
        """BatchNorm in eval mode with a scale and a shift for each frame."""
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        given = {**dict(zip(names, args)), **kwargs}
        keys = [self._keys[id(one)] for one in given.values() if id(one) in self._keys]
        if given["running_mean"] is None or given.get("training") or not keys:
            raise JointPassError("a BatchNorm has no statistics of its own")
        x = self._expand(given["input"])
        path = "".join(keys[0].rpartition(".")[:2])
        shape = (len(x), -1, *(1,) * (x.dim() - 2))
        scale, shift = self._joint.affine(path, given.get("eps", 1e-5), self._owners)
        if len(x) != len(self._rows):
            samples = self._samples_of(x)
            scale, shift = scale[samples], shift[samples]
        result = torch.addcmul(shift.view(shape), x, scale.view(shape))
        _mark(result, SAMPLES)
        return result

    def _is_broadcast(self, args: Sequence[Any]) -> bool:
        """Whether private values are broadcast along the rows of the others."""
        tensors = [one for one in args if isinstance(one, Tensor)]
        private = [one for one in tensors if id(one) in self._parts]
        batched = [one for one in tensors if id(one) not in self._parts and _kind(one)]
        dims = max(one.dim() for one in batched)
        return len({one.shape[0] for one in map(self._expand, batched)}) == 1 and all(
            (one.dim() < dims or (one.dim() == dims and one.shape[0] == 1))
            and all(part.shape == one.shape for part in self._parts[id(one)])
            for one in private
        )

    def _stack(self, args: Sequence[Any]) -> list[Any]:
        """The arguments with private values repeated for each row of the batched ones."""
        expanded = [one if id(one) in self._parts else self._expand(one) for one in args]
        batched = [one for one in expanded if isinstance(one, Tensor) and id(one) not in self._parts and _kind(one)]
        dims, places = max(one.dim() for one in batched), self._places_of(batched[0])
        for index, one in enumerate(expanded):
            if id(one) in self._parts:
                parts = torch.stack(self._parts[id(one)])
                shape = one.shape[1:] if one.dim() == dims else (*(1,) * (dims - 1 - one.dim()), *one.shape)
                expanded[index] = parts.view(len(parts), *shape)[places]
        return expanded

    def _attend(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Attention with private weights: its frames are the second axis of (T, N, C)."""

        def turn(value: Any, place: int) -> Any:
            if not isinstance(value, Tensor) or id(value) in self._parts or not _kind(value):
                return self._take(value, place)
            return self._take(_swap_axes(value), place).transpose(0, 1)

        results = [
            func(*(turn(one, place) for one in args), **{key: turn(one, place) for key, one in kwargs.items()})
            for place in range(len(self._jobs))
        ]
        joined = torch.cat([one[0] for one in results], dim=1)
        _mark(joined, SAMPLES)
        return joined, None

    def _take(self, value: Any, place: int) -> Any:
        """What one job sees of a value."""
        if not isinstance(value, Tensor):
            return value
        if id(value) in self._parts:
            return self._parts[id(value)][place]
        kind = _kind(value)
        return value if kind is None else self._part(value, place, kind)

    def _part(self, value: Tensor, place: int, kind: str) -> Tensor:
        """The rows of one job in a batched tensor."""
        if kind == FRAMES:
            rows, each = list(self._jobs[place][1]), self._rows_of(value, self._frames)
            if rows == list(range(rows[0], rows[0] + len(rows))):
                return value[rows[0] * each : (rows[0] + len(rows)) * each]
            index = [row * each + one for row in rows for one in range(each)]
            return value[torch.tensor(index, device=value.device)]
        if self._regions(value) is not None:
            return value[self._places_of(value) == place]
        each, start = self._rows_of(value, len(self._rows)), self._starts[place]
        return value[start * each : self._starts[place + 1] * each]

    def _expand(self, value: Any) -> Any:
        """A tensor with a row for each frame as one with a row for each frame of each query."""
        if not isinstance(value, Tensor) or _kind(value) != FRAMES:
            return value
        each = self._rows_of(value, self._frames)
        if self._frames == each == 1:
            result = value.expand(len(self._rows), *value.shape[1:])
        else:
            rows = [row * each + one for row in self._rows for one in range(each)]
            result = value[torch.tensor(rows, device=value.device)]
        _mark(result, SAMPLES)
        return result

    def _rows_of(self, value: Tensor, count: int) -> int:
        """The rows of each of so many frames (windows of attention are several)."""
        each, rest = divmod(value.shape[0], count) if value.dim() else (0, 1)
        if rest or not each:
            raise JointPassError(f"a tensor {tuple(value.shape)} has no rows of {count} frames")
        return each

    def _regions(self, value: Tensor) -> Tensor | None:
        """The frame of each row where the rows are regions, which a detector of two stages notes."""
        regions = getattr(self._template, "region_frames", None)
        is_regions = regions is not None and len(regions) == value.shape[0] != len(self._rows)
        return regions if is_regions else None

    def _samples_of(self, value: Tensor) -> Tensor:
        """The sample of each row of a batched tensor: of windows of attention, and of regions."""
        if (regions := self._regions(value)) is not None:
            return regions.long()
        samples = torch.arange(len(self._rows), device=value.device)
        return samples.repeat_interleave(self._rows_of(value, len(self._rows)))

    def _places_of(self, value: Tensor) -> Tensor:
        """The job of each row of a batched tensor."""
        return self._places if len(value) == len(self._rows) else self._places[self._samples_of(value)]


def _kind(value: Tensor) -> str | None:
    return getattr(value, "joint_rows", None)


def _swap_axes(value: Tensor) -> Tensor:
    turned = value.transpose(0, 1)
    _mark(turned, _kind(value))
    return turned
