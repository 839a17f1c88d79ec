"""Keeps torch's compiler out of what compiles nothing: its import takes two CPU-seconds.

Torch and torchvision import the whole of `torch._dynamo` to ask it two small questions: whether a device can be
compiled for (torchvision, when a region is pooled deterministically), and to leave a function out of compiling (torch,
when an operation on the device "meta" is written in Python). While nothing is compiled, a stand-in answers both; asked
anything else it makes way for the compiler.

What was worked out before is told without torch (models.files.remembered). This is for the first time, and for whatever
builds models: without it, they would take twice as long to start.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

COMPILER, UTILS = "torch._dynamo", "torch._dynamo.utils"
MARK = "__dynamo_disable"
"""Where torch keeps, on a function, the one that it calls in its place."""


@contextmanager
def without_compiler() -> Iterator[None]:
    """What is imported, built or counted inside does not import torch's compiler; no effect once that is there."""
    if COMPILER in sys.modules or UTILS in sys.modules:
        yield
        return
    left_out: list[Callable[..., Any]] = []

    def disable(fn: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        left_out.append(fn)
        return fn

    stand_ins = [_stand_in(COMPILER, disable=disable), _stand_in(UTILS, is_compile_supported=_is_compile_supported)]
    sys.modules.update({one.__name__: one for one in stand_ins})
    try:
        yield
    finally:
        for one in stand_ins:
            _leave(one)
        for fn in left_out:  # so that torch asks again when there is a compiler
            fn.__dict__.pop(MARK, None)


def _is_compile_supported(device_type: str) -> bool:
    return importlib.import_module(UTILS).is_compile_supported(device_type)


def _stand_in(name: str, **answers: Callable[..., Any]) -> ModuleType:
    made = ModuleType(name)

    def other(asked: str) -> Any:
        if asked.startswith("__") and (asked != "__path__" or name != COMPILER):  # what is asked of any module
            raise AttributeError(asked)
        _leave(made)
        return getattr(importlib.import_module(name), asked)

    made.__dict__.update(answers | {"__getattr__": other})
    return made


def _leave(stand_in: ModuleType) -> None:
    if sys.modules.get(stand_in.__name__) is stand_in:
        del sys.modules[stand_in.__name__]
