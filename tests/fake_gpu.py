"""A fake GPU: tensors that report a CUDA device and are computed on the CPU; operations that mix devices are recorded.

Code that runs under it puts every tensor where it belongs. It proves nothing of kernels, streams, memory or speed.
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

GPU = torch.device("cuda", 0)
CROSSES = ("copy_", "__set__", "set_", "detach", "requires_grad_", "_has_compatible_shallow_copy_type")
"""What may meet tensors from elsewhere, or only looks at them."""
STORAGES = ("untyped_storage", "_typed_storage")


_NOT_OURS = (__file__, str(Path(torch.__file__).parent))


class GpuTensor(Tensor):
    """A tensor that reports a CUDA device."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _Mode.dispatch(func, args, dict(kwargs or {}))

    def __reduce_ex__(self, protocol: int) -> Any:
        """A file holds a plain tensor: the reader chooses the device."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A CUDA device that torch seems to have; yields the operations that mixed devices: function, file and line."""
    generator, executor = torch.Generator, concurrent.futures.ThreadPoolExecutor
    own, mixed, seen = executor.__init__, list[str](), torch.zeros(1, dtype=torch.uint8)
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
        return self.dispatch(func, args, dict(kwargs or {}))

    @classmethod
    def dispatch(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call the function; its result is a GpuTensor where torch would have put it on the GPU."""
        with torch._C.DisableTorchFunctionSubclass():
            name, tensors = func.__name__, [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            there = any(isinstance(one, GpuTensor) for one in tensors)
            if name == "__get__" and there and (value := _PROPERTIES.get(func.__self__.__name__)) is not None:
                return value
            if name in ("numpy", "__array__", "pin_memory") and there:
                raise TypeError(f"{name} of a GPU tensor")
            if name in ("to", "cpu", "cuda"):
                return move_tensor(name, *args, **kwargs)
            if name == "pin_memory":
                return args[0]
            if name == "__deepcopy__" and there:
                return copy_tensor(*args)
            device = kwargs.get("device")
            if device is not None:
                there = torch.device(device).type == "cuda"
                kwargs["device"] = "cpu" if there else device
            elif there and name not in CROSSES and _meet(name, args, tensors):
                ours = [one for one in traceback.extract_stack() if not one.filename.startswith(_NOT_OURS)]
                cls.mixed.append(f"{name} ({ours[-1].filename}:{ours[-1].lineno})")
            found = func(*args, **kwargs)
            return tree_map(_put, found) if there and name not in STORAGES and name != "__set__" else found


_PROPERTIES = {"device": GPU, "is_cuda": True, "is_cpu": False}


def _meet(name: str, args: Any, tensors: list[Tensor]) -> bool:
    """Whether the arguments mix devices in a way that torch refuses: single numbers and indices may."""
    if name in ("__getitem__", "__setitem__"):
        return not isinstance(args[0], GpuTensor) and any(isinstance(one, GpuTensor) for one in tree_leaves(args[1]))
    return any(not isinstance(one, GpuTensor) and one.ndim > 0 for one in tensors)


def _put(one: Any) -> Any:
    return one.as_subclass(GpuTensor) if isinstance(one, Tensor) and not isinstance(one, GpuTensor) else one


def move_tensor(name: str, tensor: Any, *given: Any, **named: Any) -> Tensor:
    """`Tensor.to`, `cpu` and `cuda`."""
    targets = [one for one in given if isinstance(one, (str, torch.device, Tensor))]
    others = [one for one in given if isinstance(one, torch.dtype)]
    device = named.pop("device", {"cpu": "cpu", "cuda": GPU}.get(name))
    named.pop("non_blocking", None)
    for one in targets:
        device = one if not isinstance(one, Tensor) else GPU if isinstance(one, GpuTensor) else one.device
        others += [one.dtype] if isinstance(one, Tensor) else []
    here = not isinstance(tensor, GpuTensor)
    to_card = not here if device is None else torch.device(device).type == "cuda"
    found = tensor.to(*others, **named) if others or named else tensor
    if to_card:
        return _put(found.clone() if here and found is tensor else found)
    elsewhere = device is not None and torch.device(device).type != "cpu"
    found = found.as_subclass(Tensor) if not here else found
    return found.to(device) if elsewhere else found.clone() if found is tensor and not here else found


def copy_tensor(tensor: Any, memo: dict[int, Any]) -> Any:
    if id(tensor) not in memo:
        made = _put(tensor.detach().as_subclass(Tensor).clone()).requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            made._is_param = True
        memo[id(tensor)] = made
    return memo[id(tensor)]
