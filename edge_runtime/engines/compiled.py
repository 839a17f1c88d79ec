"""What a failure of the device is called, in every form it comes in.

Makes a package of an architecture by AOTInductor, with nothing of any weight inside.

The engine `compiled`: a package made by AOTInductor that holds no weights, its constants views of the arena.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from edge_runtime.engines.base import EngineError, FrameEngine, peak_bytes
from edge_runtime.engines.cuda_graphs import cuda_graphs_for
from edge_runtime.engines.package_cache import CachedFile, EngineCache, architecture_key
from edge_runtime.memory.arena import TensorOf, WaitFor
from edge_runtime.memory.memory_format import WeightFormat
from edge_runtime.scheduler.costs import BATCHES
from models.bundle import Bundle, BundleQuery
from models.detector import Detector, OneStage
from models.device import disable_tf32, is_out_of_memory
from models.process import quiet


@contextmanager
def report_out_of_memory(device: torch.device) -> Iterator[None]:
    """Code compiled by AOTInductor fails with a RuntimeError that does not say why: OutOfMemoryError where torch's
    allocator has counted one meanwhile. On a card alone.
    """
    before = _refused(device)
    try:
        yield
    except RuntimeError as error:
        if _refused(device) > before and not is_out_of_memory(error):
            raise torch.OutOfMemoryError(f"CUDA out of memory in compiled code: {error}") from error
        raise


def _refused(device: torch.device) -> int:
    """How often the allocator had to refuse so far."""
    return torch.cuda.memory_stats(device).get("num_ooms", 0) if device.type == "cuda" else 0


PACKAGE_SUFFIX = ".pt2"
INDUCTOR_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
PACKAGE_FORMAT = 2
"""Counted up when packages are made differently, so that older ones are made anew."""
OUTPUT_TOLERANCE = 1e-3
"""The most an output may be from the eager one, in shares of its tensor's largest value."""
MIN_SCALE = 1e-3
"""What that largest value is taken for where it is less."""
MAX_MADE_VALUES = 100_000
OPTIONS = {
    # Weights come from the arena: none in the package, none folded, packed or copied while it is made.
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.use_runtime_constant_folding": False,
    "joint_graph_constant_folding": False,
    "freezing": False,
    # Else vectors of up to 8 values, such as the bias of a head of few classes, would be written into the code.
    "always_keep_tensor_constants": True,
    # Headers compiled before lie where anybody could have put them, whatever folder Inductor is given.
    "cpp_cache_precompile_headers": False,
    "aot_inductor.precompile_headers": False,
}


class _Flat(nn.Module):
    """A network whose outputs are a list of tensors, whatever they are in."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, frames: Tensor) -> list[Tensor]:
        leaves = pytree.tree_leaves(self.network(frames))
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise EngineError("its outputs are more than tensors")
        return leaves


def package_key(query: BundleQuery, model: nn.Module, device: torch.device) -> dict[str, Any]:
    """The key of the package that serves this query."""
    return {"engine": "compiled", "format": PACKAGE_FORMAT, **architecture_key(query, model, device)}


@contextmanager
def inductor_cache(folder: Path) -> Iterator[None]:
    """Let Inductor keep what it makes, and loads again as code, in this folder: its own default is open to guesses."""
    before = os.environ.get(INDUCTOR_FOLDER)
    os.environ[INDUCTOR_FOLDER] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[INDUCTOR_FOLDER]
        else:
            os.environ[INDUCTOR_FOLDER] = before


def compile_package(bundle: Bundle, query: BundleQuery, device: torch.device, path: Path) -> Mapping[str, Any]:
    """Write the package to `path`; returns its workspace by batch and the constants that are no weights.

    It takes any batch, and frames and weights of convolutions in channels-last order. Takes 20 to 60 seconds on one
    core. Raises EngineError for an architecture that cannot be compiled.
    """
    model = _in_memory(bundle, query, device)
    size = query.input_size
    frames = torch.rand(2, 3, size, size, device=device).contiguous(memory_format=torch.channels_last)
    try:
        with quiet(), torch.no_grad():
            program = torch.export.export(
                model,
                (frames,),
                dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
                prefer_deferred_runtime_asserts_over_guards=True,
            )
            constants = _constants_of(program, device)
            torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=OPTIONS)
            package = torch._inductor.aoti_load_package(str(path), run_single_threaded=True)
        outside = set(package.get_constant_fqns())
        built_in = sorted(_used(program) - outside)
        if built_in or not outside <= model.state_dict().keys() | constants.keys():
            raise EngineError(f"the compiler put weights into the code: {', '.join(built_in[:3]) or 'under new names'}")
        with torch.inference_mode():
            _verify(model, package, frames, constants)
            workspace = {batch: _peak(package, size, batch, device) for batch in BATCHES}
    except EngineError:
        raise
    except Exception as error:  # a compiler can fail in any way, and so can what it made
        cause = " ".join(str(error.__cause__ or error).split())[:200]
        raise EngineError(f"it cannot be compiled: {cause}") from error
    return {
        "model": query.model,
        "workspace": workspace,
        "constants": {name: _noted(tensor) for name, tensor in constants.items() if name in outside},
    }


def _in_memory(bundle: Bundle, query: BundleQuery, device: torch.device) -> _Flat:
    """The network with copies of the query's tensors, arranged as the arena reorders them."""
    network = bundle.build(query.id, device, copy=True).requires_grad_(False)
    return _Flat(network.to(memory_format=torch.channels_last)).eval()  # type: ignore[call-overload]


def _constants_of(program: torch.export.ExportedProgram, device: torch.device) -> dict[str, Tensor]:
    """Constants of the network's code: tensors that it makes of numbers written there, small all together.

    On the device, wherever the code makes them: a package refuses others.
    """
    found = {
        name: value.to(device)
        for name, value in program.constants.items()
        if isinstance(value, Tensor) and name not in program.state_dict
    }
    if sum(value.numel() for value in found.values()) > MAX_MADE_VALUES:
        raise EngineError("its code holds large constants outside its state_dict")
    return found


def _used(program: torch.export.ExportedProgram) -> set[str]:
    """The parameters and buffers that the network reads."""
    signature = program.graph_signature
    targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    return {
        targets[node.name]
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in targets and node.users
    }


@disable_tf32()
def _verify(model: _Flat, package: Any, frames: Tensor, constants: Mapping[str, Tensor]) -> None:
    """Compare with eager, then once more after every weight was changed in place, which shows one left inside."""
    state = {**constants, **model.state_dict()}
    generator = torch.Generator(frames.device).manual_seed(0)
    _hand_over(package, state)
    for changed in (False, True):
        if changed:
            for tensor in model.state_dict().values():
                if tensor.is_floating_point():
                    tensor.mul_(torch.empty_like(tensor).uniform_(0.9, 1.1, generator=generator))
        for count in (2, 1):
            for got, wanted in zip(package(frames[:count]), model(frames[:count]), strict=True):
                scale = max(MIN_SCALE, float(wanted.abs().max())) if wanted.numel() else 1.0
                apart = float((got - wanted).abs().max()) / scale if wanted.numel() else 0.0
                if not apart <= OUTPUT_TOLERANCE:
                    raise EngineError(f"compiled, its outputs are {apart:.1e} from eager ones")


def _peak(package: Any, size: int, count: int, device: torch.device) -> int:
    """Workspace of a run of `count` frames, the input included."""
    frames = torch.rand(count, 3, size, size, device=device).contiguous(memory_format=torch.channels_last)
    package(frames)
    return peak_bytes(lambda: package(frames), device) + frames.nbytes


def _hand_over(package: Any, state: Mapping[str, Tensor]) -> None:
    wanted = {name: state[name] for name in package.get_constant_fqns()}
    package.load_constants(wanted, check_full_update=True, user_managed=True)


def _noted(tensor: Tensor) -> dict[str, Any]:
    """A constant as JSON values."""
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "values": tensor.reshape(-1).tolist(),
    }


COMPILERS = ("g++", "clang++", "c++")
CUDA_FOLDER = "/usr/local/cuda"


class CompiledEngine(FrameEngine):
    """One query's architecture compiled by AOTInductor for this machine, for any batch.

    Packages are kept by architecture (`EngineCache`), so that it is compiled once; weights and norms stay outside, so
    that a shared tensor is one. Outputs differ from eager ones in rounding alone. Preparing raises EngineError for an
    architecture that cannot be compiled (two-stage detectors), and without a compiler.
    """

    name = "compiled"
    formats = frozenset({WeightFormat.CHANNELS_LAST})

    def __init__(
        self, bundle: Bundle, query_id: str, device: str | torch.device = "cpu", cache: EngineCache | None = None
    ) -> None:
        super().__init__(bundle, query_id, device)
        self._bundle, self._cache = bundle, cache
        self._kept: CachedFile | None = None
        self._package: Any = None
        self._constants: dict[str, str] = {}
        self._made: dict[str, Tensor] = {}
        self._bound: dict[str, Tensor] = {}
        self._spec: pytree.TreeSpec | None = None
        self._graphs = cuda_graphs_for(self.device)
        self._placement: tuple[int, ...] = ()

    @classmethod
    def missing(cls, device: str) -> str | None:
        """A C++ compiler for the processor's code; for a card's Triton and CUDA's headers beside it."""
        if not find_compiler():
            return f"no C++ compiler: none of {', '.join(COMPILERS)} is on the path"
        if device == "cuda" and importlib.util.find_spec("triton") is None:
            return "triton is missing"
        if device == "cuda" and not has_cuda_headers():
            return f"no headers of CUDA: CUDA_HOME is not set, nvcc not on the path, {CUDA_FOLDER} not there"
        return None

    @classmethod
    def detail(cls, device: str) -> str:
        return f"AOTInductor of torch {torch.__version__} on {device}, compiler {find_compiler()}"

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
        with inductor_cache(self._cache.compilers()):
            self._kept = self._cache.fetch(
                key, PACKAGE_SUFFIX, lambda path: compile_package(self._bundle, self.query, self.device, path)
            )
        self._workspace_bytes = None

    def bind(self, tensor_of: TensorOf, wait: WaitFor | None = None) -> None:
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
        with report_out_of_memory(self.device):
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


def find_compiler() -> str | None:
    """The C++ compiler that AOTInductor would call: $CXX where it is set."""
    named = os.environ.get("CXX")
    found = (shutil.which(one) for one in ((named,) if named else COMPILERS))
    return next((path for path in found if path), None)


def has_cuda_headers() -> bool:
    """Whether torch finds a CUDA toolkit where it looks for one: AOTInductor's code for a card includes its headers."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return bool(named or shutil.which("nvcc") or os.path.exists(CUDA_FOLDER))


def _made(value: dict[str, Any], device: torch.device) -> Tensor:
    """A constant of the network's code (no weight of it), as it was noted."""
    return torch.tensor(value["values"], dtype=getattr(torch, value["dtype"]), device=device).view(value["shape"])
