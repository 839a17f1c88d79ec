"""The engine `compiled`: a package made by AOTInductor that holds no weights, its constants views of the arena."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from edge_runtime.engines.base import EngineError, FrameEngine, peak_bytes
from edge_runtime.engines.package_cache import CachedFile, EngineCache, architecture_key
from edge_runtime.memory.arena import TensorOf, WaitFor
from edge_runtime.memory.store import WeightFormat
from edge_runtime.scheduler.costs import BATCHES
from models.bundle import Bundle, BundleQuery, open_bundle
from models.detector import Detector, OneStage
from models.device import disable_tf32, is_out_of_memory
from models.process import quiet

PACKAGE_SUFFIX = ".pt2"
PACKAGE_FORMAT = 3
"""Incremented when packages are made differently, so that older ones are made anew."""
OUTPUT_TOLERANCE = 1e-3
"""The largest difference of an output from the eager one, as a fraction of its tensor's largest value."""
MIN_SCALE = 1e-3
"""The smallest value that counts as the largest of a tensor."""
MAX_CONSTANT_VALUES = 100_000
"""Of constants that the network's code makes, all together."""
COMPILERS = ("g++", "clang++", "c++")
CUDA_FOLDER = "/usr/local/cuda"
INDUCTOR_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
OPTIONS = {
    # Weights come from the arena: none in the package, none folded, packed or copied while it is made.
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.use_runtime_constant_folding": False,
    "joint_graph_constant_folding": False,
    "freezing": False,
    # Else vectors of up to 8 values, such as the bias of a head of few classes, would be written into the code.
    "always_keep_tensor_constants": True,
    # Precompiled headers are kept where other users may write, whatever folder Inductor is given.
    "cpp_cache_precompile_headers": False,
    "aot_inductor.precompile_headers": False,
}
COMPILE = "import sys; sys.path.pop(0); from edge_runtime.engines.compiled import main; main(sys.argv[1])"
"""Runs `main` without the current folder on the path of modules."""

log = logging.getLogger("gemel.run")


class BatchRange(Enum):
    """The batches that a package takes."""

    ANY = "any"
    ONE = "one"
    MANY = "many"

    def takes(self, count: int) -> bool:
        """Whether a run of `count` frames is in the range."""
        return self is BatchRange.ANY or (count == 1) == (self is BatchRange.ONE)


class CompiledEngine(FrameEngine):
    """One query's architecture compiled by AOTInductor for this machine, for any batch.

    Packages are cached by architecture (`EngineCache`); weights and norms stay outside, so that a shared tensor exists
    once. Outputs differ from eager ones by rounding alone. Preparing raises EngineError for an architecture that cannot
    be compiled (two-stage detectors), and without a compiler.
    """

    name = "compiled"
    formats = frozenset({WeightFormat.CHANNELS_LAST})

    def __init__(
        self, bundle: Bundle, query_id: str, device: str | torch.device = "cpu", cache: EngineCache | None = None
    ) -> None:
        super().__init__(bundle, query_id, device)
        self._bundle, self._cache = bundle, cache
        self._files: dict[BatchRange, CachedFile] = {}
        self._packages: dict[BatchRange, Any] = {}
        self._bound: dict[str, Tensor] = {}
        self._weights: dict[str, str] = {}
        self._constants: dict[BatchRange, dict[str, Tensor]] = {}
        self._spec: pytree.TreeSpec | None = None

    @property
    def queues_whole_runs(self) -> bool:
        """On a GPU compiled code queues all kernels before the GPU has run them."""
        return self.device.type != "cpu"

    @classmethod
    def missing(cls, device: str) -> str | None:
        """A C++ compiler; for a GPU Triton and CUDA's headers too."""
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
        """Compile this architecture, or find its packages; nothing is loaded before `bind`."""
        if self._files:
            return
        if isinstance(self.model, Detector) and not isinstance(self.model, OneStage):
            raise EngineError("a two-stage detector's second stage depends on what the first one finds")
        reason = self.missing(self.device.type)
        if reason is not None:
            raise EngineError(reason)
        cache = self._cache = self._cache or EngineCache()
        architecture = architecture_key(self.query, self.model, self.device)
        key = {"engine": "compiled", "format": PACKAGE_FORMAT, **architecture}

        def fetch(batches: BatchRange) -> CachedFile:
            def make(path: Path) -> Mapping[str, Any]:
                log.info("compiling %s: takes a minute or so, once per architecture", self.query.model)
                return compile_apart(self._bundle, self.query, self.device, batches, path, cache.compilers())

            return cache.fetch({**key, "batches": batches.value}, PACKAGE_SUFFIX, make)

        # For a GPU torch specialises a batch of one, so it has a separate package.
        ranges = (BatchRange.ANY,) if self.device.type == "cpu" else (BatchRange.ONE, BatchRange.MANY)
        with ThreadPoolExecutor(len(ranges)) as pool:  # each waits for a process of its own
            self._files = dict(zip(ranges, pool.map(fetch, ranges), strict=True))

    def bind(self, tensor_of: TensorOf, wait: WaitFor | None = None) -> None:
        """Hand the packages views of the arena: nothing is copied, so the tensors must stay where they are."""
        if not self._packages:
            self._load()
        # A package holds addresses; the tensors themselves are kept alive here.
        self._bound = {key: tensor_of(name) for key, name in self._weights.items()}
        for batches, package in self._packages.items():
            set_constants(package, {**self._bound, **self._constants[batches]})

    def unbind(self) -> None:
        """Drop the packages, which cannot drop what they are bound to."""
        self._packages = {}
        self._bound = {}

    def forward(self, batch: Tensor) -> Any:
        """As the model's forward, from compiled code."""
        if not self._packages:
            raise RuntimeError("bind comes before the first run")
        assert self._spec is not None
        package = next(own for batches, own in self._packages.items() if batches.takes(len(batch)))
        with report_out_of_memory(self.device):
            outputs = package(batch)
        return pytree.tree_unflatten(outputs, self._spec)

    def workspace_of(self, count: int) -> int:
        """As measured when the packages were made; before that the eager estimate."""
        if not self._files:
            return super().workspace_of(count)
        notes = [file.notes["workspace"] for file in self._files.values()]
        measured = {int(batch): nbytes for own in notes for batch, nbytes in own.items()}
        above = [batch for batch in measured if batch >= count]
        return measured[min(above)] if above else -(-count * measured[max(measured)] // max(measured))

    def _load(self) -> None:
        from torch._inductor import aoti_load_package

        self.prepare()
        for batches, file in self._files.items():
            self._packages[batches] = aoti_load_package(str(file.path), run_single_threaded=True)
        names = {f"network.{path}": name for path, name in self.query.tensors.items()}
        self._constants = {
            batches: {
                key: torch.tensor(one["values"], dtype=getattr(torch, one["dtype"]), device=self.device)
                for key, one in file.notes["constants"].items()
            }
            for batches, file in self._files.items()
        }
        wanted = {key for package in self._packages.values() for key in package.get_constant_fqns()}
        self._weights = {key: name for key, name in names.items() if key in wanted}
        self._spec = pytree.tree_structure(self.model(torch.empty(1, 3, *self.query.preprocess.size, device="meta")))


def find_compiler() -> str | None:
    """The C++ compiler that AOTInductor would call: $CXX where it is set."""
    named = os.environ.get("CXX")
    found = (shutil.which(one) for one in ((named,) if named else COMPILERS))
    return next((path for path in found if path), None)


def has_cuda_headers() -> bool:
    """Whether torch finds a CUDA toolkit: AOTInductor's code for a GPU includes its headers."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return bool(named or shutil.which("nvcc") or os.path.exists(CUDA_FOLDER))


@contextmanager
def report_out_of_memory(device: torch.device) -> Iterator[None]:
    """Raise OutOfMemoryError where compiled code fails with a plain RuntimeError after torch's allocator refused it
    memory. On a GPU alone.
    """
    if device.type == "cpu":
        yield
        return
    before = torch.cuda.memory_stats(device).get("num_ooms", 0)
    try:
        yield
    except RuntimeError as error:
        if torch.cuda.memory_stats(device).get("num_ooms", 0) > before and not is_out_of_memory(error):
            raise torch.OutOfMemoryError(f"CUDA out of memory in compiled code: {error}") from error
        raise


def set_constants(package: Any, state: Mapping[str, Tensor]) -> None:
    """Set a package's constants to these tensors, which the caller keeps alive."""
    wanted = {name: state[name] for name in package.get_constant_fqns()}
    package.load_constants(wanted, check_full_update=True, user_managed=True)


def compile_apart(
    bundle: Bundle, query: BundleQuery, device: torch.device, batches: BatchRange, path: Path, folder: Path
) -> Mapping[str, Any]:
    """`compile_package` in a process of its own: a compiler that crashes, or keeps memory, does not affect this one.

    Inductor caches in `folder`: its default folder is shared between users. Raises EngineError.
    """
    request = {
        "bundle": str(bundle.path.resolve()),
        "factories": sorted(bundle.factories),
        "folder": None if bundle.folder is None else str(bundle.folder.resolve()),
        "query": query.id,
        "device": str(device),
        "batches": batches.value,
        "path": str(path),
        "threads": torch.get_num_threads(),
    }
    paths = os.pathsep.join(one for one in sys.path if one)
    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", COMPILE, json.dumps(request)],
        env={**os.environ, "PYTHONPATH": paths, INDUCTOR_FOLDER: str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    try:
        answer = json.loads(ended.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        lines = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
        crash = next((at for at, line in enumerate(lines) if line.startswith("Fatal Python error")), len(lines) - 3)
        detail = " | ".join(lines[max(0, crash) :][:6])
        raise EngineError(f"its compiler ended with {ended.returncode}: {detail}"[:600]) from None
    if "error" in answer:
        raise EngineError(answer["error"])
    return answer["notes"]


def main(request: str) -> None:
    """Compile what `compile_apart` requests; the notes, or the reason why not, are the last line of stdout."""
    given = json.loads(request)
    torch.set_num_threads(given["threads"])
    folder = None if given["folder"] is None else Path(given["folder"])
    bundle = open_bundle(given["bundle"], given["factories"], folder)
    try:
        query, device = bundle.query(given["query"]), torch.device(given["device"])
        notes = compile_package(bundle, query, device, BatchRange(given["batches"]), Path(given["path"]))
        answer: dict[str, Any] = {"notes": notes}
    except EngineError as error:
        answer = {"error": str(error)}
    print("\n" + json.dumps(answer), flush=True)


class _FlatOutputs(nn.Module):
    """A network whose outputs are a list of tensors, whatever they are in."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, frames: Tensor) -> list[Tensor]:
        leaves = pytree.tree_leaves(self.network(frames))
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise EngineError("its outputs are more than tensors")
        return leaves


def compile_package(
    bundle: Bundle, query: BundleQuery, device: torch.device, batches: BatchRange, path: Path
) -> Mapping[str, Any]:
    """Write the package to `path`; returns its workspace by batch and the constants that are no weights.

    It takes these batches, and frames and weights of convolutions channels last. Takes 20 to 60 seconds on one core.
    Raises EngineError for an architecture that cannot be compiled.
    """
    network = bundle.build(query.id, device, copy=True).requires_grad_(False)
    model = _FlatOutputs(network.to(memory_format=torch.channels_last)).eval()  # type: ignore[call-overload]
    frames = torch.rand(3, 3, *query.preprocess.size, device=device).contiguous(memory_format=torch.channels_last)
    counts = [count for count in (2, 1, 3) if batches.takes(count)]
    dynamic = None
    if batches is not BatchRange.ONE:
        dynamic = ({0: torch.export.Dim("batch", min=1 if batches is BatchRange.ANY else 2)},)
    try:
        with quiet(), torch.no_grad():
            program = torch.export.export(
                model,
                (frames[: counts[0]],),
                dynamic_shapes=dynamic,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
            constants = _constants_of(program, device)
            torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=OPTIONS)
            package = torch._inductor.aoti_load_package(str(path), run_single_threaded=True)
        outside = set(package.get_constant_fqns())
        built_in = sorted(_used_weights(program) - outside)
        if built_in or not outside <= model.state_dict().keys() | constants.keys():
            names = ", ".join(built_in[:3]) or "under new names"
            raise EngineError(f"the compiler put weights into the code: {names}")
        with torch.inference_mode():
            verify_package(model, package, frames, counts, constants)
            workspace = {}
            for count in filter(batches.takes, BATCHES):
                frames = torch.rand(count, 3, *query.preprocess.size, device=device).contiguous(
                    memory_format=torch.channels_last
                )
                package(frames)
                workspace[count] = peak_bytes(partial(package, frames), device) + frames.nbytes
    except EngineError:
        raise
    except Exception as error:  # a compiler, and the code it made, can raise errors of any type
        cause = " ".join(str(error.__cause__ or error).split())[:200]
        raise EngineError(f"it cannot be compiled: {cause}") from error
    return {
        "model": query.model,
        "workspace": workspace,
        "constants": {
            name: {"dtype": str(tensor.dtype).removeprefix("torch."), "values": tensor.tolist()}
            for name, tensor in constants.items()
            if name in outside
        },
    }


def _constants_of(program: torch.export.ExportedProgram, device: torch.device) -> dict[str, Tensor]:
    """Constants that the network's code makes of literal numbers, small all together; on the device.

    A package refuses constants on another device.
    """
    found = {
        name: value.to(device)
        for name, value in program.constants.items()
        if isinstance(value, Tensor) and name not in program.state_dict
    }
    if sum(value.numel() for value in found.values()) > MAX_CONSTANT_VALUES:
        raise EngineError("its code holds large constants outside its state_dict")
    return found


def _used_weights(program: torch.export.ExportedProgram) -> set[str]:
    """The parameters and buffers that the network reads."""
    signature = program.graph_signature
    targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    return {
        targets[node.name]
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in targets and node.users
    }


@disable_tf32()
def verify_package(
    model: nn.Module, package: Any, frames: Tensor, counts: Sequence[int], constants: Mapping[str, Tensor]
) -> None:
    """Compare with eager outputs, and again after every weight was changed in place, which reveals one left inside."""
    generator = torch.Generator(frames.device).manual_seed(0)
    set_constants(package, {**constants, **model.state_dict()})
    for changed in (False, True):
        if changed:
            for tensor in model.state_dict().values():
                if tensor.is_floating_point():
                    tensor.mul_(torch.empty_like(tensor).uniform_(0.9, 1.1, generator=generator))
        for count in counts:
            for got, wanted in zip(package(frames[:count]), model(frames[:count]), strict=True):
                scale = max(MIN_SCALE, float(wanted.abs().max())) if wanted.numel() else 1.0
                difference = float((got - wanted).abs().max()) / scale if wanted.numel() else 0.0
                if not difference <= OUTPUT_TOLERANCE:
                    raise EngineError(f"compiled, its outputs are {difference:.1e} from eager ones")
