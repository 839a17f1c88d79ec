"""How a run is spread over a model's layers, on paper: what streaming layer by layer is reckoned from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edge_runtime.rehearsal.profiles import DeviceProfile, layers_on_paper
from edge_runtime.rehearsal.streamed import Layer

if TYPE_CHECKING:
    from models.bundle import Bundle, BundleQuery


def layers_for(profile: DeviceProfile, bundle: Bundle) -> dict[str, tuple[Layer, ...]]:
    """The layers of a bundle's queries in the order of their modules, for a device.

    A layer's share of a run follows from its operations and one call; what functions without weights compute is spread
    over all.
    """
    return {query.id: _layers(profile, bundle, query) for query in bundle.queries}


def _layers(profile: DeviceProfile, bundle: Bundle, query: BundleQuery) -> tuple[Layer, ...]:
    found = _counted(bundle, query)
    seconds = [one["flops"] / profile.flops_per_s + profile.launch_s for one in found]
    names, total_s = query.tensors, sum(seconds)
    return tuple(
        Layer(tuple(dict.fromkeys(names[key] for key in one["keys"])), own_s / total_s, one["times"])
        for one, own_s in zip(found, seconds, strict=True)
    )


def _counted(bundle: Bundle, query: BundleQuery) -> list[dict[str, Any]]:
    """State dict keys, operations and fills of each layer."""
    flops = _flops_by_module(bundle, query)
    return [
        {"keys": [part.key for part in layer.parts], "flops": flops.get(layer.path, 0), "times": layer.times}
        for layer in layers_on_paper(bundle, query)
    ]


def _flops_by_module(bundle: Bundle, query: BundleQuery) -> dict[str, int]:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    model, size = bundle.build(query.id, "meta").eval(), query.input_size
    with torch.inference_mode(False), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.empty(1, 3, size, size, device="meta"))
    return {path.partition(".")[2]: sum(ops.values()) for path, ops in counter.get_flop_counts().items()}
