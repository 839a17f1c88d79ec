"""A network that runs a list of steps one after the other: nothing that a file says becomes source.

torch.fx would write a file's names into the Python source of a module; here they are keys of dictionaries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn

from gemel.models.graph.operators import OPERATORS

Change = Callable[["NetworkStep", Any], Any]
"""What to put in the place of a step's result."""
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "part": getitem,
    "pad": nn.functional.pad,
    "transpose": torch.t,
}
"""Functions that are no operator of ONNX."""
RESERVED = frozenset({
    *dir(nn.Module()), "add_submodule", "code", "delete_all_unused_submodules", "delete_submodule", "graph",
    "list_steps", "print_readable", "recompile", "run_steps", "to_folder",
})  # fmt: skip
"""Names that no part of a weight's path may have: attributes of modules, and those that bundles avoid already."""


class StepKind(Enum):
    """What a step calls by its name."""

    OPERATOR = "operator"
    FUNCTION = "function"
    MODULE = "module"
    """A submodule, by its path."""
    TENSOR = "tensor"
    """Nothing: it gives the parameter or buffer at a path."""


@dataclass(frozen=True)
class Result:
    """An argument that is what another step gave; number 0 is the picture."""

    number: int


@dataclass(frozen=True)
class NetworkStep:
    """One call: its arguments are plain values or Results. What `unused` lists is not read after it."""

    kind: StepKind
    name: str
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    unused: tuple[int, ...] = ()

    @property
    def sources(self) -> tuple[int, ...]:
        """The numbers of the results that it reads, in order."""
        return tuple(argument.number for argument in self.arguments if isinstance(argument, Result))

    def __deepcopy__(self, memo: dict[int, Any]) -> NetworkStep:
        return self  # it is never changed


class StepNetwork(nn.Module):
    """Frames (N, 3, H, W) -> a tuple of the outputs. Its modules, parameters and buffers lie at the paths of its steps.

    With `one_by_one` each frame of a batch is computed alone, as its file takes one picture at a time.
    """

    def __init__(self, one_by_one: bool = False) -> None:
        super().__init__()
        self._one_by_one = one_by_one
        self._steps: tuple[NetworkStep, ...] = ()
        self._ends: tuple[int, ...] = ()

    def set_steps(self, steps: Sequence[NetworkStep], ends: Sequence[int]) -> None:
        """Run these steps from now on; `ends` are the numbers of the outputs, and step k gives the result k + 1."""
        last = {
            number: place
            for place, step in enumerate(steps)
            for number in (*step.sources, place + 1)
        }
        unused: list[list[int]] = [[] for _ in steps]
        for number, place in last.items():
            if number not in ends:
                unused[place].append(number)
        self._steps = tuple(
            NetworkStep(step.kind, step.name, step.arguments, step.options, tuple(numbers))
            for step, numbers in zip(steps, unused, strict=True)
        )
        self._ends = tuple(ends)

    def list_steps(self) -> tuple[NetworkStep, ...]:
        """The steps in the order in which they run."""
        return self._steps

    def forward(self, frames: Tensor) -> tuple[Tensor, ...]:
        if not self._one_by_one:
            return self.run_steps(frames)
        answers = [self.run_steps(frame[None]) for frame in frames]
        return tuple(
            torch.cat([output if output.shape[:1] == (1,) else output[None] for output in outputs])
            for outputs in zip(*answers)
        )

    def run_steps(self, frames: Tensor, change: Change | None = None) -> tuple[Tensor, ...]:
        """The outputs for frames that are computed together; `change` may replace what each step gives."""
        results: list[Any] = [None] * (len(self._steps) + 1)
        results[0] = frames
        for number, step in enumerate(self._steps, 1):
            result = self._run_step(step, results)
            results[number] = result if change is None else change(step, result)
            for place in step.unused:
                results[place] = None
        return tuple(results[number] for number in self._ends)

    def _run_step(self, step: NetworkStep, results: list[Any]) -> Any:
        kind = step.kind
        name = step.name
        if kind is StepKind.TENSOR:
            return self._find_tensor(name)
        arguments = [
            results[argument.number] if type(argument) is Result else argument
            for argument in step.arguments
        ]
        if kind is StepKind.MODULE:
            return self._find_module(name)(*arguments)
        call = OPERATORS[name].run if kind is StepKind.OPERATOR else FUNCTIONS[name]
        return call(*arguments, **step.options)

    def _find_module(self, path: str) -> nn.Module:
        module: Any = self
        for part in path.split("."):
            module = module._modules[part]
        return module

    def _find_tensor(self, path: str) -> Tensor:
        owner, _, name = path.rpartition(".")
        module = self._find_module(owner) if owner else self
        tensor = module._parameters.get(name)
        return module._buffers[name] if tensor is None else tensor  # type: ignore[return-value]
