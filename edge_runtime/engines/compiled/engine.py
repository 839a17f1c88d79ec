"""The engine `compiled`: a package made by AOTInductor that holds no weights, its constants views of the arena."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from edge_runtime.engines.base import EngineError, FrameEngine
from edge_runtime.engines.cache import EngineCache, Kept
from edge_runtime.engines.compiled.making import SUFFIX, compile_package, compiling_in, package_key
from edge_runtime.engines.graphs import graphs_for
from edge_runtime.memory.binding import TensorOf, Wait
from edge_runtime.memory.faults import telling_out_of_memory
from edge_runtime.memory.layout import Order
from models.bundle import Bundle
from models.detector import Detector, OneStage

COMPILERS = ("g++", "clang++", "c++")
CUDA_FOLDER = "/usr/local/cuda"


class CompiledEngine(FrameEngine):
    """One query's architecture compiled by AOTInductor for this machine, for any batch.

    Packages are kept by architecture (`EngineCache`), so that it is compiled once; weights and norms stay outside, so
    that a shared tensor is one. Outputs differ from eager ones in rounding alone. Preparing raises EngineError for an
    architecture that cannot be compiled (two-stage detectors), and without a compiler.
    """

    name = "compiled"
    orders = frozenset({Order.CHANNELS_LAST})

    def __init__(
        self, bundle: Bundle, query_id: str, device: str | torch.device = "cpu", cache: EngineCache | None = None
    ) -> None:
        super().__init__(bundle, query_id, device)
        self._bundle, self._cache = bundle, cache
        self._kept: Kept | None = None
        self._package: Any = None
        self._constants: dict[str, str] = {}
        self._made: dict[str, Tensor] = {}
        self._bound: dict[str, Tensor] = {}
        self._spec: pytree.TreeSpec | None = None
        self._graphs = graphs_for(self.device)
        self._placement: tuple[int, ...] = ()

    @classmethod
    def missing(cls, device: str) -> str | None:
        """A C++ compiler for the processor's code; for a card's Triton and CUDA's headers beside it."""
        if not compiler():
            return f"no C++ compiler: none of {', '.join(COMPILERS)} is on the path"
        if device == "cuda" and importlib.util.find_spec("triton") is None:
            return "triton is missing"
        if device == "cuda" and not cuda_headers():
            return f"no headers of CUDA: CUDA_HOME is not set, nvcc not on the path, {CUDA_FOLDER} not there"
        return None

    @classmethod
    def detail(cls, device: str) -> str:
        return f"AOTInductor of torch {torch.__version__} on {device}, compiler {compiler()}"

    def prepare(self) -> None:
        """Compile this architecture, or find its package; nothing is loaded before `bind`."""
        if self._kept is not None:
            return
        if isinstance(self.model, Detector) and not isinstance(self.model, OneStage):
            raise EngineError("a two-stage detector's second stage depends on what the first one finds")
        why = self.missing(self.device.type)
        if why is not None:
            raise EngineError(why)
        self._cache = self._cache or EngineCache()
        key = package_key(self.query, self.model, self.device)
        with compiling_in(self._cache.compilers()):
            self._kept = self._cache.fetch(
                key, SUFFIX, lambda path: compile_package(self._bundle, self.query, self.device, path)
            )
        self._workspace_bytes = None

    def bind(self, tensor_of: TensorOf, wait: Wait | None = None) -> None:
        """Hand the package views of the arena: nothing is copied, so the tensors must stay where they are."""
        package = self._package = self._package or self._load()
        # The package knows addresses alone; what lies there has to be kept alive here.
        self._bound = {name: tensor_of(own) for name, own in self._constants.items()} | self._made
        package.load_constants(self._bound, check_full_update=True, user_managed=True)
        if self._graphs is not None:
            self._placement = tuple(tensor.data_ptr() for tensor in self._bound.values())

    def unbind(self) -> None:
        """Drop the package, which has no other way to let go of what it was bound to."""
        self._package = None
        self._bound = {}
        if self._graphs is not None:
            self._graphs.clear()

    def forward(self, batch: Tensor) -> Any:
        """As the model's forward, from compiled code."""
        if self._package is None:
            raise RuntimeError("bind comes before the first run")
        assert self._spec is not None
        outputs = (
            self._called(batch) if self._graphs is None else self._graphs.run(self._placement, self._called, batch)
        )
        return pytree.tree_unflatten(outputs, self._spec)

    def workspace_of(self, count: int) -> int:
        """As measured when the package was made; before that the eager estimate."""
        if self._kept is None:
            return super().workspace_of(count)
        measured = {int(batch): nbytes for batch, nbytes in self._kept.notes["workspace"].items()}
        above = [batch for batch in measured if batch >= count]
        return measured[min(above)] if above else -(-count * measured[max(measured)] // max(measured))

    def _called(self, batch: Tensor) -> list[Tensor]:
        with telling_out_of_memory(self.device):
            return self._package(batch)

    def _load(self) -> Any:
        from torch._inductor import aoti_load_package

        self.prepare()
        assert self._kept is not None
        package = aoti_load_package(str(self._kept.path), run_single_threaded=True)
        names = {f"network.{path}": name for path, name in self.query.tensors.items()}
        wanted = package.get_constant_fqns()
        self._made = {
            name: _made(self._kept.notes["constants"][name], self.device) for name in wanted if name not in names
        }
        self._constants = {name: names[name] for name in wanted if name in names}
        size = self.query.input_size
        outputs = self.model(torch.empty(1, 3, size, size, device="meta"))
        self._spec = pytree.tree_structure(outputs)
        return package


def compiler() -> str | None:
    """The C++ compiler that AOTInductor would call: $CXX where it is set."""
    named = os.environ.get("CXX")
    found = (shutil.which(one) for one in ((named,) if named else COMPILERS))
    return next((path for path in found if path), None)


def cuda_headers() -> bool:
    """Whether torch finds a CUDA toolkit where it looks for one: AOTInductor's code for a card includes its headers."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return bool(named or shutil.which("nvcc") or os.path.exists(CUDA_FOLDER))


def _made(value: dict[str, Any], device: torch.device) -> Tensor:
    """A constant of the network's code (no weight of it), as it was noted."""
    return torch.tensor(value["values"], dtype=getattr(torch, value["dtype"]), device=device).view(value["shape"])
