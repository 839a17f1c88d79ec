"""torchvision, imported without torch's compiler: a twentieth of the time."""

from models.compiler import without_compiler

with without_compiler():
    import torchvision

__all__ = ["torchvision"]
