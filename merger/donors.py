"""The queries of a bundle as donors: others may take their networks and layers, which stay as a box has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from gemel.merger.workload_data import LazyDict
from gemel.models.bundle import Bundle, BundleQuery
from gemel.models.bundle.format import code_of, has_code, raw_bytes, tensor_name
from gemel.models.export.export_document import describe_architecture
from gemel.models.quantization import PackedWeight
from gemel.models.sharing.groups import groups
from gemel.models.sharing.layers import Layer, layers_of
from gemel.models.sharing.similarity import cosine_likeness
from gemel.models.workload import Query


class Donors:
    """Queries of a bundle that may give their network, or single layers, and are never changed by it.

    `models` are their networks with the weights that a box computes with, packed ones unpacked. `records` are all
    queries of the bundle that stay: a tensor that one of them has costs nothing more.
    """

    def __init__(
        self,
        bundle: Bundle | None = None,
        queries: Mapping[str, Query] | None = None,
        records: Sequence[BundleQuery] = (),
        device: torch.device | None = None,
    ) -> None:
        self._bundle, self._records, self._device = bundle, records, device
        self.queries: Mapping[str, Query] = queries or {}
        self.models: Mapping[str, nn.Module] = LazyDict(self.queries, self._build)

    def choose_lenders(self, layers: Mapping[str, Sequence[Layer]], models: Mapping[str, nn.Module]) -> dict[str, str]:
        """Query -> the donor whose layers it could take for the most bytes, the most alike first; without any, none.

        `layers` are those of the queries to be merged.
        """
        offered = {donor: layers_of(query) for donor, query in self.queries.items()}
        chosen = dict[str, str]()
        for query, own in layers.items():
            states = {query: models[query].state_dict()}
            worth = Counter[str]()
            for donor, others in offered.items():
                if not {layer.wide for layer in own} & {layer.wide for layer in others}:
                    continue
                states[donor] = self.models[donor].state_dict()
                likeness = cosine_likeness(states)
                size = {(layer.query, layer.path): layer for layer in (*own, *others)}
                for group in groups([*own, *others], "wide", likeness=likeness):
                    first, second = (size[member] for member in group.members)
                    worth[donor] += round(group.bytes * (1 + likeness(first, second)))
            if worth:
                chosen[query] = max(worth, key=lambda donor: worth[donor])
        return chosen

    def documents(self) -> dict[str, bytes | None]:
        """The ONNX documents of the bundle by architecture (models.export.export_document)."""
        if self._bundle is None:
            return {}
        return {
            describe_architecture(record, self._bundle.build(record.id, "meta")): self._bundle.document_of(record.id)
            for record in self._records
            if record.document is not None and record.id in self.queries
        }

    def holds(self, tensor: Tensor) -> bool:
        """Whether the bundle has this tensor already, packed or not."""
        return bool(self._held) and has_code(tensor.dtype) and _name_of(tensor) in self._held

    def add_packed(
        self, models: Mapping[str, nn.Module], packed: Mapping[str, dict[str, PackedWeight]]
    ) -> dict[str, dict[str, PackedWeight]]:
        """What is stored packed, with the tensors of these models that the bundle holds packed as they are there."""
        if not self._held:
            return dict(packed)
        whole = {query: dict(packed.get(query, {})) for query in models}
        for query, model in models.items():
            for key, tensor in model.state_dict().items():
                weight = self._held.get(_name_of(tensor)) if tensor.dtype == torch.float32 else None
                if weight is not None and key not in whole[query]:
                    whole[query][key] = weight
        return {query: weights for query, weights in whole.items() if weights}

    def _build(self, query: Query) -> nn.Module:
        assert self._bundle is not None
        model = self._bundle.build(query.id, copy=True)
        return model.to(self._device, memory_format=torch.channels_last).eval().requires_grad_(False)  # type: ignore

    @cached_property
    def _held(self) -> dict[str, PackedWeight | None]:
        """Content name of each tensor of the bundle's queries as a network uses it -> how it is packed, if it is."""
        held, bundle = dict[str, PackedWeight | None](), self._bundle
        places = {(name, record.stored.get(key)): (record.id, key)
                  for record in self._records for key, name in record.tensors.items()}  # fmt: skip
        for (name, stored), (query, key) in places.items():
            if stored is None:
                held[name] = None
                continue
            assert bundle is not None
            tensor = bundle.tensor(name)
            scale = None if stored.scale is None else bundle.tensor(stored.scale)
            weight = PackedWeight(tensor, scale, stored.dtype, stored.shape or tuple(tensor.shape))
            held[_name_of(bundle.wide_tensor(query, key))] = weight
        return held


def _name_of(tensor: Tensor) -> str:
    return tensor_name(code_of(tensor.dtype), tuple(tensor.shape), raw_bytes(tensor))
