"""Makes a package of an architecture by AOTInductor, with nothing of any weight inside."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from edge_runtime.engines.architecture import key_of
from edge_runtime.engines.base import EngineError
from edge_runtime.engines.workspace import peak_bytes
from edge_runtime.scheduler.costs import BATCHES
from models.bundle import Bundle, BundleQuery
from models.device import disable_tf32
from models.process import quiet

SUFFIX = ".pt2"
INDUCTOR_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
FORMAT = 2
"""Counted up when packages are made differently, so that older ones are made anew."""
TOLERANCE = 1e-3
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
    return {"engine": "compiled", "format": FORMAT, **key_of(query, model, device)}


@contextmanager
def compiling_in(folder: Path) -> Iterator[None]:
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

    It takes any batch, and frames and weights of convolutions in channels-last order. Takes 20 to 60 seconds on one core. Raises EngineError for an architecture that
    cannot be compiled.
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
    """The network with copies of the query's tensors, arranged as the arena arranges them."""
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
                if not apart <= TOLERANCE:
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
