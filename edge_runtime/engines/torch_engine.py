"""The engine `torch`: eager PyTorch, its parameters and buffers set to the arena's tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from gemel.edge_runtime.engines.base import FULL
from gemel.edge_runtime.engines.cuda_graphs import cuda_graphs_for
from gemel.edge_runtime.engines.joint_pass import JointForward, JointPass, JointPassError, Member
from gemel.edge_runtime.engines.tensor_engine import TensorEngine
from gemel.edge_runtime.engines.weight_streaming import HALF, PinnedStream, WeightStreaming
from gemel.edge_runtime.memory.binding import TensorOf, WaitFor, WeightFormat
from gemel.models.bits import BIT_WIDTHS
from gemel.models.bundle import Bundle
from gemel.models.zoo.user_models import has_loose_tensors


class ParameterSlot:
    """One parameter or buffer of a module, and the name of the tensor it takes."""

    def __init__(self, model: nn.Module, path: str, name: str) -> None:
        owner, _, self._attribute = path.rpartition(".")
        module = model.get_submodule(owner)
        self._is_parameter = self._attribute in module._parameters
        self._where: dict[str, Any] = module._parameters if self._is_parameter else module._buffers
        self.bound: Tensor | None = None
        self.name = name

    def set(self, tensor: Tensor) -> None:
        """Let the module use this tensor from now on; no bytes are copied."""
        if not self._is_parameter:
            self._where[self._attribute] = tensor
        elif self.bound is not None and (self.bound.device, self.bound.layout) == (tensor.device, tensor.layout):
            self._where[self._attribute].data = tensor  # a tenth of what a new parameter costs
        else:
            self._where[self._attribute] = nn.Parameter(tensor, False)
        self.bound = tensor

    def clear(self) -> None:
        """Set a tensor on the meta device."""
        if self.bound is not None:
            self.set(torch.empty(self.bound.shape, dtype=self.bound.dtype, device="meta"))


def awaited_tensors(model: nn.Module, state: Mapping[str, str]) -> dict[nn.Module, list[str]]:
    """The modules that wait before they run, each with the names of its tensors.

    A module that has weights of its own and children may read the children's without calling them (attention does), so
    it waits for theirs too.
    """
    owners = {path.rpartition(".")[0] for path in state}
    layers: dict[nn.Module, list[str]] = {}
    for path, name in state.items():
        parts = path.split(".")[:-1]
        prefixes = (".".join(parts[:length]) for length in range(len(parts) + 1))
        first = next(prefix for prefix in prefixes if prefix in owners)
        layers.setdefault(model.get_submodule(first), []).append(name)
    return layers


@contextmanager
def start_as_arriving(layers: Mapping[nn.Module, Iterable[str]], wait: WaitFor) -> Iterator[None]:
    """While the context lasts, each layer waits for its own tensors before it runs.

    Only what is called through its forward waits; a module that reads another's parameters does not.
    """

    def hook_for(names: tuple[str, ...]) -> Callable[..., None]:
        return lambda _module, _inputs: wait(names)

    hooks = [module.register_forward_pre_hook(hook_for(tuple(names))) for module, names in layers.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


PRECISIONS: dict[str, torch.dtype | None] = {FULL: None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What convolutions and matrix products may be computed in."""


class TorchEngine(TensorEngine):
    """PyTorch, in any `precision`: every architecture and bit width; needs gemel[merge].

    One query's module, its parameters and buffers set to the tensors it is bound to.

    Until `bind` its tensors are on the meta device and a run fails. Packed weights stay packed in the arena and are
    unpacked while a run needs them; tensors named in `overflow` are never bound but copied from the bundle in each run,
    where it `overlaps` beside the layers before (`WeightStreaming`). Outputs are bit-equal to those of the module that
    `Bundle.build` makes. With `precision` "bf16" or "fp16" convolutions and matrix products are computed so (autocast):
    weights are cast in every run, outputs differ in the third digit. With `half`, and on a GPU always, float16 weights
    are computed with as they are. On a GPU runs are replayed from CUDA graphs. Raises BundleError when the bundle's
    tensors don't fit the architecture.
    """

    name = "torch"
    starts_early = True
    formats = frozenset(WeightFormat)
    runs_packed = frozenset(BIT_WIDTHS)
    options: ClassVar = {"precision": Literal[tuple(PRECISIONS)]}

    def __init__(
        self,
        bundle: Bundle,
        query_id: str,
        device: str | torch.device = "cpu",
        precision: str = FULL,
        overflow: Collection[str] = (),
        overlaps: bool = False,
        half: bool = False,
    ) -> None:
        super().__init__(bundle, query_id, device)
        self._is_loose = has_loose_tensors(self.model)
        if self._is_loose:
            self.model = bundle.build_unbound(query_id, self.device)
        half = half or self.device.type != "cpu"
        self._cast_to, self._overflow = PRECISIONS[precision], frozenset(overflow)
        if half and self._cast_to is None and any(own.dtype == HALF for own in self.query.stored.values()):
            self._cast_to = torch.float16
        largest = max(map(bundle.nbytes, overflow), default=0)
        streamed = PinnedStream(largest, self.device) if largest and self.device.type != "cpu" else None
        kind = "cuda" if half else "cpu"
        self._staging = WeightStreaming(self.model, bundle, self.query, overflow, kind, streamed, overlaps)
        staged = self._staging.keys
        self._slots = [
            ParameterSlot(self.model, path, name) for path, name in self.query.tensors.items() if path not in staged
        ]
        self._layers = awaited_tensors(self.model, self.query.places())
        self._wait: WaitFor | None = None
        self._graphs = None if overflow else cuda_graphs_for(self.device)
        self._placement: tuple[int, ...] = ()

    def bind(self, tensor_of: TensorOf, wait: WaitFor | None = None) -> None:
        """Point every parameter and buffer at the tensor of its name; those that are bound to it are left alone."""
        for slot in self._slots:
            tensor = tensor_of(slot.name)
            if tensor is not slot.bound:
                slot.set(tensor)
        self._staging.bind(tensor_of, wait)
        self._wait = wait
        if self._graphs is not None:
            bound = [slot.bound for slot in self._slots if slot.bound is not None]
            self._placement = tuple(tensor.data_ptr() for tensor in (*bound, *self._staging.bound))

    def unbind(self) -> None:
        """Put the module back on the meta device."""
        for slot in self._slots:
            slot.clear()
        self._staging.unbind()
        if self._graphs is not None:
            self._graphs.clear()

    def forward(self, batch: Tensor) -> Any:
        """What the module returns; where its tensors are still arriving, layer by layer as they do."""
        if self._graphs is None or self._wait is not None:
            return self._run_model(batch)
        return self._graphs.run(self._placement, self._run_model, batch)

    @classmethod
    def join(cls, engines: Sequence[TorchEngine]) -> JointForward | None:
        """A joint pass over the modules, unless one unpacks weights, casts or has tensors outside its state dict.

        An overflow is copied once for all, so it must be the same of all.
        """
        if not all(engine._is_plain for engine in engines) or len({engine._overflow for engine in engines}) > 1:
            return None
        try:
            return JointPass([Member(engine.model, engine.query.tensors, engine._scratch) for engine in engines])
        except JointPassError:
            return None

    @property
    def _is_plain(self) -> bool:
        """Whether the module alone computes what `forward` returns."""
        return self._cast_to is None and not self.query.stored and not self._is_loose

    def _scratch(self) -> AbstractContextManager[None]:
        return self._staging.scratch(self.device)

    def _run_model(self, batch: Tensor) -> Any:
        arriving = start_as_arriving(self._layers, self._wait) if self._wait else nullcontext()
        # Without autocast's cache, which would be a second copy of the weights.
        casting = (
            torch.autocast(self.device.type, self._cast_to, cache_enabled=False) if self._cast_to else nullcontext()
        )
        with arriving, self._staging.scratch(self.device), casting:
            return self.model(batch)

    def workspace_of(self, count: int) -> int:
        """Intermediates, and the scratch for what is unpacked or overflows."""
        return super().workspace_of(count) + self._staging.bytes

    @property
    def replays(self) -> bool:
        """Whether it has graphs to replay."""
        return self._graphs is not None and self._graphs.any

    @property
    def queues_whole_runs(self) -> bool:
        """Whether the next run is likely replayed from a graph."""
        return self.replays and self._wait is None

    @property
    def overflow_bytes(self) -> int:
        """The bytes that runs have copied from the bundle so far."""
        return self._staging.overflow_bytes
