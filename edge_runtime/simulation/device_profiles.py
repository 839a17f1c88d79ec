"""Device profiles for the virtual clock: modelled from published figures, not measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemel.edge_runtime.scheduler.costs import BATCHES, BatchCost, Costs, JointCost, QueryCost
from gemel.edge_runtime.scheduler.eviction import OverflowLayer, scratch_bytes
from gemel.models.bundle.model_spec import is_zoo_model
from gemel.models.export.document_costs import count_document
from gemel.models.files.extras import require_merge
from gemel.models.sharing.flop_rates import LayerFlops, saved_operations
from gemel.models.sharing.passes import joint_queries

if TYPE_CHECKING:
    from gemel.models.bundle import Bundle, BundleQuery

GIB = 2**30

# Assumed: eager convolutions at batch 1 reach half of the published fp32 rate, copies 70 % of the link's rate.
COMPUTE_SHARE = 0.5
LINK_SHARE = 0.7
# Assumed: what the framework spends to call one leaf module, by class of host CPU.
CALL_ON_X86_S, CALL_ON_ARM_S, CALL_ON_SLOW_ARM_S = 15e-6, 40e-6, 90e-6
# Assumed: opening one load, on unified memory a read from storage, on a discrete card a copy from pinned memory.
READ_LATENCY_S, PINNED_COPY_LATENCY_S = 0.5e-3, 0.05e-3
# Published: PCIe 3.0 carries 0.985 GB/s a lane, PCIe 4.0 twice that; eMMC 5.1 (HS400) 0.4 GB/s.
PCIE3_LANE_BYTES_PER_S, EMMC_BYTES_PER_S = 0.985e9, 0.4e9


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A device as the virtual clock sees it.

    `flops_per_s` and `copy_bytes_per_s` are effective rates, derived from published ones as `sources` says;
    `launch_s` is spent per leaf module called, `load_latency_s` once per load. `memory_bytes` is all the memory
    there is, on unified devices the CPU's too. `modelled` is True as long as nothing was measured on the device.
    """

    name: str
    title: str
    memory_bytes: int
    copy_bytes_per_s: float
    flops_per_s: float
    launch_s: float
    modelled: bool
    sources: tuple[str, ...]
    load_latency_s: float = READ_LATENCY_S


def _unified_device(
    name: str, title: str, memory_gib: int, link_bytes_per_s: float, fp32_flops_per_s: float, launch_s: float,
    source: str,
) -> DeviceProfile:  # fmt: skip
    """A device whose CPU and GPU share one memory: what is not resident is read from storage into it."""
    assumed = "weights come from storage, at 70 % of the link's rate (assumed)", HALF_PEAK
    return DeviceProfile(
        name, title, memory_gib * GIB, link_bytes_per_s * LINK_SHARE, fp32_flops_per_s * COMPUTE_SHARE, launch_s,
        modelled=True, sources=(source, *assumed),
    )  # fmt: skip


HALF_PEAK = "half of the fp32 peak is reached (assumed)"
_PROFILES = (
    _unified_device(
        "orin-nano-8gb", "Jetson Orin Nano 8 GB (15 W)", 8, 4 * PCIE3_LANE_BYTES_PER_S, 1.28e12, CALL_ON_ARM_S,
        "NVIDIA, Jetson Orin Nano Series data sheet: 1024 Ampere cores at 625 MHz (2 flops a clock each: "
        "1.28 TFLOPS fp32), 40 TOPS sparse INT8, 8 GB LPDDR5 at 68 GB/s, PCIe 3.0 x4 for NVMe",
    ),
    _unified_device(
        "jetson-nano", "Jetson Nano 4 GB", 4, EMMC_BYTES_PER_S, 0.236e12, CALL_ON_SLOW_ARM_S,
        "NVIDIA, Jetson Nano data sheet: 128 Maxwell cores at 921 MHz (0.236 TFLOPS fp32), 4 GB LPDDR4 at "
        "25.6 GB/s, eMMC 5.1",
    ),
    _unified_device(
        "xavier-nx", "Jetson Xavier NX 8 GB", 8, 4 * PCIE3_LANE_BYTES_PER_S, 0.845e12, CALL_ON_ARM_S,
        "NVIDIA, Jetson Xavier NX data sheet: 384 Volta cores at 1100 MHz (0.845 TFLOPS fp32), 8 GB LPDDR4x at "
        "51.2 GB/s; NVMe at PCIe 3.0 x4",
    ),
    _unified_device(
        "agx-orin", "Jetson AGX Orin 32 GB", 32, 8 * PCIE3_LANE_BYTES_PER_S, 3.33e12, CALL_ON_ARM_S,
        "NVIDIA, Jetson AGX Orin Series data sheet: 1792 Ampere cores at 930 MHz (3.33 TFLOPS fp32), 32 GB "
        "LPDDR5 at 204.8 GB/s, PCIe 4.0 x4 for NVMe",
    ),
    DeviceProfile(
        "t4", "NVIDIA T4 16 GB", 16 * GIB, 16 * PCIE3_LANE_BYTES_PER_S * LINK_SHARE, 8.1e12 * COMPUTE_SHARE,
        CALL_ON_X86_S, modelled=True, load_latency_s=PINNED_COPY_LATENCY_S,
        sources=(
            "NVIDIA, T4 data sheet: 8.1 TFLOPS fp32, 16 GB GDDR6 at 320 GB/s, PCIe 3.0 x16",
            "weights come from pinned host memory, at 70 % of the link's rate (assumed)",
            HALF_PEAK,
        ),
    ),
)  # fmt: skip
PROFILES = {profile.name: profile for profile in _PROFILES}


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What one frame costs a model, whatever the device; `scratch_bytes` stays the same for many frames.

    `layers` has the operations up to each module (`models.export.cost.layer_flops`).
    """

    flops: int
    workspace_bytes: int
    scratch_bytes: int
    leaves: int
    norms: frozenset[str] = frozenset()
    """The paths of its BatchNorms."""
    layers: LayerFlops = ()


_MODULE_COSTS: dict[tuple[object, ...], ModelCost] = {}


def cost_of_module(bundle: Bundle, query: BundleQuery) -> ModelCost:
    """What PyTorch runs, found on the meta device; once for all queries whose zoo model is built and stored alike."""
    packed = tuple(sorted((path, own.dtype) for path, own in query.stored.items()))
    key = (query.task, query.network, repr(query.model_args), query.input_size, len(query.classes), packed)
    if key in _MODULE_COSTS:
        return _MODULE_COSTS[key]
    from torch.nn.modules.batchnorm import _BatchNorm

    from gemel.models.export.cost import layer_flops, workspace_bytes

    model, size = bundle.build(query.id, "meta"), query.input_size
    leaves = sum(not any(module.children()) for module in model.modules())
    scratch = scratch_bytes(overflow_layers(bundle, query)) if packed else 0
    norms = frozenset(path for path, module in model.named_modules() if isinstance(module, _BatchNorm))
    layers = layer_flops(model, size)
    found = ModelCost(layers[-1][1], workspace_bytes(model, size), scratch, leaves, norms, layers)
    if is_zoo_model(query.model) or query.graph is not None:
        _MODULE_COSTS[key] = found
    return found


def cost_of_document(bundle: Bundle, query: BundleQuery) -> ModelCost:
    """What the query's document says, without torch; InputError where the bundle does not hold it."""
    counted = count_document(query, bundle.document_of(query.id))
    return ModelCost(counted.flops, counted.workspace_bytes, 0, counted.calls, counted.norms, counted.layers)


CostOf = Callable[["Bundle", "BundleQuery"], ModelCost]


def costs_for(profile: DeviceProfile, bundle: Bundle, cost_of: CostOf = cost_of_module) -> Costs:
    """The costs of a bundle's queries on a profiled device, for batches of 1, 2, 4 and 8.

    A run takes its operations at the effective rate, however many frames they are for, plus `launch_s` per leaf
    module called; intermediates grow with the batch. `cost_of` counts operations and workspace; nothing is allocated.
    """
    models = {query.id: cost_of(bundle, query) for query in bundle.queries}
    queries = {query.id: _query_cost(profile, bundle, query, models[query.id]) for query in bundle.queries}
    names = {name for cost in queries.values() for name in cost.tensors}
    joint = tuple(
        _joint_cost(profile, bundle, alike, models[alike[0]], min(queries[query].sla_s for query in alike))
        for alike in joint_queries(bundle.queries, bundle.nbytes)
    )
    return Costs(
        queries, {name: bundle.nbytes(name) for name in sorted(names)}, profile.copy_bytes_per_s,
        profile.load_latency_s, joint=joint,
    )  # fmt: skip


def _joint_cost(
    profile: DeviceProfile, bundle: Bundle, alike: Sequence[str], found: ModelCost, sla_s: float
) -> JointCost:
    """One pass of these queries: a tied module is called once, a private one for each query, a norm once.

    The queries take frames in turns, those with one view the same ones, of which they run a common prefix once.
    """
    own = [query for query in bundle.queries if query.id in alike]
    private = {
        key.rpartition(".")[0]
        for key in own[0].tensors
        if len({query.tensors[key] for query in own}) > 1 and key.rpartition(".")[0] not in found.norms
    }
    calls = found.leaves + (len(own) - 1) * len(private)
    has_common_view = len({query.view for query in own}) < len(own)
    layers = dict.fromkeys(alike, found.layers) if has_common_view else {}

    def operations(count: int) -> float:
        frames = {query.id: (count - place + len(own) - 1) // len(own) for place, query in enumerate(own)}
        return count * found.flops - (saved_operations(own, layers, frames) if layers else 0.0)

    batches = (
        BatchCost(
            count,
            operations(count) / profile.flops_per_s + calls * profile.launch_s,
            count * found.workspace_bytes + found.scratch_bytes,
        )
        for count in BATCHES
    )
    return JointCost(tuple(alike), QueryCost.of_batches((), sla_s, batches))


def _query_cost(profile: DeviceProfile, bundle: Bundle, query: BundleQuery, found: ModelCost) -> QueryCost:
    batches = (
        BatchCost(
            count,
            count * found.flops / profile.flops_per_s + found.leaves * profile.launch_s,
            count * found.workspace_bytes + found.scratch_bytes,
        )
        for count in BATCHES
    )
    return QueryCost.of_batches(bundle.names_in_order(query.id), query.sla_ms / 1000, batches)


def overflow_layers(bundle: Bundle, query: BundleQuery, device: str = "cuda") -> tuple[OverflowLayer, ...]:
    """What a query's layers need at once on a device of this kind."""
    require_merge(f"query {query.id}, which is too large for the memory alone,")
    from gemel.edge_runtime.engines.weight_streaming import streamable_layers

    return streamable_layers(bundle.build(query.id, "meta").eval(), query, device)
