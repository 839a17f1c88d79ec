"""A card made up: tensors that say they lie on one, computed on the processor, and what meets from both is told.

What runs so has every tensor where it belongs. It says nothing of kernels, streams, memory or speed.
"""

from __future__ import annotations

import concurrent.futures
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # reads the annotations of what is stood in for below
import torch.distributed.tensor  # the same
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

CARD = torch.device("cuda", 0)
CROSSES = ("copy_", "__set__", "set_", "detach", "requires_grad_", "_has_compatible_shallow_copy_type")
"""What may meet tensors from elsewhere, or only looks at them."""
STORAGES = ("untyped_storage", "_typed_storage")


_NOT_OURS = (__file__, str(Path(torch.__file__).parent))


class OnCard(Tensor):
    """A tensor that says it lies on the card."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _Mode.told(func, args, dict(kwargs or {}))


@contextmanager
def a_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Within there seems to be a card; the list is of what met that lay here and there: the function, and who asked."""
    generator, executor = torch.Generator, concurrent.futures.ThreadPoolExecutor
    own, mixed, seen = executor.__init__, list[str](), torch.zeros(1, dtype=torch.uint8)
    save = torch.save
    stand_ins: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "get_device_name": lambda *_: "made up", "is_bf16_supported": lambda *_, **__: True,
        "get_rng_state": lambda *_: seen, "set_rng_state": lambda *_: None, "synchronize": lambda *_: None,
    }  # fmt: skip
    with monkeypatch.context() as patch:
        for name, stand_in in stand_ins.items():
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(torch, "Generator", lambda device="cpu": generator("cpu"))
        patch.setattr(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", lambda _: None, raising=False)
        patch.setattr(torch, "save", lambda content, file: save(tree_map(_taken, content), file))
        patch.setattr(executor, "__init__", lambda one, *given: own(one, *given, initializer=_Mode().__enter__))
        patch.setattr(_Mode, "mixed", mixed)
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            with _Mode():
                yield mixed
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(before)


class _Mode(TorchFunctionMode):
    """Sees every function of torch that is called."""

    mixed: list[str] = []  # noqa: RUF012

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.told(func, args, dict(kwargs or {}))

    @classmethod
    def told(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What the function returns, on the card where that would lie there."""
        with torch._C.DisableTorchFunctionSubclass():
            name, tensors = func.__name__, [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            there = any(isinstance(one, OnCard) for one in tensors)
            if name == "__get__" and there and (said := _SAID.get(func.__self__.__name__)) is not None:
                return said
            if name in ("numpy", "__array__", "pin_memory") and there:
                raise TypeError(f"{name} of what lies on a card")
            if name in ("to", "cpu", "cuda"):
                return _moved(name, *args, **kwargs)
            if name == "pin_memory":
                return args[0]
            if name == "__deepcopy__" and there:
                return _copied(*args)
            device = kwargs.get("device")
            if device is not None:
                there = torch.device(device).type == "cuda"
                kwargs["device"] = "cpu" if there else device
            elif there and name not in CROSSES and _meet(name, args, tensors):
                ours = [one for one in traceback.extract_stack() if not one.filename.startswith(_NOT_OURS)]
                cls.mixed.append(f"{name} ({ours[-1].filename}:{ours[-1].lineno})")
            found = func(*args, **kwargs)
            return tree_map(_put, found) if there and name not in STORAGES and name != "__set__" else found


_SAID = {"device": CARD, "is_cuda": True, "is_cpu": False}


def _meet(name: str, args: Any, tensors: list[Tensor]) -> bool:
    """Whether some lie on the card and others do not, which torch refuses but for single numbers and for indices."""
    if name in ("__getitem__", "__setitem__"):
        return not isinstance(args[0], OnCard) and any(isinstance(one, OnCard) for one in tree_leaves(args[1]))
    return any(not isinstance(one, OnCard) and one.ndim > 0 for one in tensors)


def _put(one: Any) -> Any:
    return one.as_subclass(OnCard) if isinstance(one, Tensor) and not isinstance(one, OnCard) else one


def _taken(one: Any) -> Any:
    """What is stored of a tensor: where it lay is asked when it is read."""
    return one.as_subclass(Tensor) if isinstance(one, OnCard) else one


def _moved(name: str, tensor: Any, *given: Any, **named: Any) -> Tensor:
    """`Tensor.to`, `cpu` and `cuda`."""
    asked = [one for one in given if isinstance(one, (str, torch.device, Tensor))]
    others = [one for one in given if isinstance(one, torch.dtype)]
    device = named.pop("device", {"cpu": "cpu", "cuda": CARD}.get(name))
    named.pop("non_blocking", None)
    for one in asked:
        device = one if not isinstance(one, Tensor) else CARD if isinstance(one, OnCard) else one.device
        others += [one.dtype] if isinstance(one, Tensor) else []
    here = not isinstance(tensor, OnCard)
    to_card = not here if device is None else torch.device(device).type == "cuda"
    found = tensor.to(*others, **named) if others or named else tensor
    if to_card:
        return _put(found.clone() if here and found is tensor else found)
    elsewhere = device is not None and torch.device(device).type != "cpu"
    found = found.as_subclass(Tensor) if not here else found
    return found.to(device) if elsewhere else found.clone() if found is tensor and not here else found


def _copied(tensor: Any, memo: dict[int, Any]) -> Any:
    if id(tensor) not in memo:
        made = _put(tensor.detach().as_subclass(Tensor).clone()).requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            made._is_param = True
        memo[id(tensor)] = made
    return memo[id(tensor)]
