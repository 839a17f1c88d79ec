"""torchvision, imported without torch's compiler.

torchvision asks `torch._dynamo.utils` one question, and only when a region is pooled deterministically; to be able to
ask, it imports the whole compiler, which takes two CPU-seconds, 20 times as long as all the rest of it. So a stand-in
takes that module's place while torchvision is imported; it hands on whatever it is asked later.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo.utils"
ASKED = "is_compile_supported"


def _stand_in() -> ModuleType:
    made = ModuleType(COMPILER)

    def is_compile_supported(device_type: str) -> bool:
        return getattr(importlib.import_module(COMPILER), ASKED)(device_type)

    def other(name: str) -> Any:  # of a torchvision that asks for more: the compiler itself
        if name.startswith("__"):  # what the import system asks of any module
            raise AttributeError(name)
        if sys.modules.get(COMPILER) is made:
            del sys.modules[COMPILER]
        return getattr(importlib.import_module(COMPILER), name)

    made.__dict__.update({ASKED: is_compile_supported, "__getattr__": other})
    return made


if "torchvision" not in sys.modules and COMPILER not in sys.modules:
    _taken = sys.modules[COMPILER] = _stand_in()
    try:
        import torchvision
    finally:
        if sys.modules.get(COMPILER) is _taken:
            del sys.modules[COMPILER]
else:
    import torchvision

__all__ = ["torchvision"]
