"""The ONNX model of one query with its weights, for ONNX Runtime on a processor: what queries share stays shared.

A norm is folded into its convolution where that costs no second copy of a weight, or a small one; elsewhere it follows
as a convolution of one weight and one bias for each channel, which ONNX Runtime fuses with what comes next. Weights of
int8 and int4 stay packed behind a DequantizeLinear, and their norms go into its scales; where the query has ranges of
activations, what is int8 or int4 is computed in integers of eight bits, and the weights of other layers are unpacked
once. Needs no torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from gemel.models.bits import Bits
from gemel.models.bundle.manifest import BundleQuery, wide_shape
from gemel.models.bundle.query_documents import key_of_weight
from gemel.models.bundle.stored_arrays import unpack_nibbles
from gemel.models.graph.activations import list_wide_products, name_places, quantize_activations
from gemel.models.graph.proto_graph import Constant, ProtoGraph, ProtoNode, make_node
from gemel.models.graph.stored import transposed_weights
from gemel.models.graph.upgrade import AXIS_OPSET, upgrade_to_axes

ArrayOf = Callable[[str], np.ndarray]
"""Gives a tensor of the bundle by its name, as stored."""
MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own operators; its DequantizeLinear takes int4 and an axis in a model of any opset."""
MAX_COPIED_FRACTION = 0.025
"""Of a query's weights, what folding may store again for it: that buys the layers whose norms cost most."""
FOLDING_FUSIONS = ("ConvBNFusion", "ConvMulFusion", "ConvAddFusion", "MatmulBNFusion")
"""ONNX Runtime's own folds, each of which makes a private weight of a shared one."""


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm and the convolution before it.

    `weight` and `scale` say what they read by content: equal for two norms whose folded weights are equal.
    """

    node: ProtoNode
    conv: ProtoNode
    weight: str
    scale: tuple[str, ...]
    is_packed: bool


@dataclass(frozen=True)
class NormUses:
    """How many different scales each weight is read with, over all queries of a bundle."""

    scales_by_weight: Mapping[str, int]

    def copies(self, norm: Norm) -> bool:
        """Whether folding this norm stores a weight again that others read."""
        return not norm.is_packed and self.scales_by_weight[norm.weight] > 1


def count_norm_uses(
    queries: Sequence[BundleQuery], document_of: Callable[[BundleQuery], onnx.ModelProto]
) -> NormUses:
    """What all queries read, from their documents alone; a weight without a norm counts as one with none."""
    scales: dict[str, set[tuple[str, ...]]] = {}
    for query in queries:
        graph = ProtoGraph(document_of(query))
        contents = _contents_of(graph, query)
        norms = list(find_norms(graph, query, contents))
        for norm in norms:
            scales.setdefault(norm.weight, set()).add(norm.scale)
        normed = {norm.conv for norm in norms}
        for node in graph.nodes:
            for name in node.inputs:
                if name in contents and node not in normed:
                    scales.setdefault(contents[name], set()).add(())
    return NormUses(Counter({weight: len(variants) for weight, variants in scales.items()}))


def build_query_graph(
    query: BundleQuery,
    document: onnx.ModelProto,
    array_of: ArrayOf,
    uses: NormUses,
    header: Mapping[str, Any],
    in_integers: bool | None = None,
) -> ProtoGraph:
    """The graph of a query with its weights; `header` are the bundle's entries by tensor name.

    `in_integers`: codes of int4 are widened to int8, whose products are computed; by default where it has activations.
    """
    places = name_places(document)
    in_integers = bool(query.activations) if in_integers is None else in_integers
    can_compute = False
    if query.stored:
        document, can_compute = upgrade_to_axes(document)
    graph = ProtoGraph(document)
    contents = _contents_of(graph, query)
    transposed = transposed_weights(graph) if query.graph is not None else set()
    packed = _fill_weights(graph, query, array_of, header, transposed, can_compute and in_integers)
    _convert_norms(graph, query, uses, contents, packed)
    if can_compute and query.activations:
        quantize_activations(graph, places, query.activations)
        _widen_weights(graph)
    _remove_unused(graph)
    return graph


def reads_shared_weights(query: BundleQuery, counts: Mapping[str, int]) -> bool:
    """Whether any tensor of two or more dimensions, which a fold could change, is also another query's."""
    return any(counts[name] > 1 for name in set(query.tensors.values()))


def _contents_of(graph: ProtoGraph, query: BundleQuery) -> dict[str, str]:
    """The tensor that each initialiser of a document refers to, by name."""
    return {
        name: query.tensors[key_of_weight(query, name)]
        for name, constant in graph.constants.items()
        if constant.array is None
    }


@dataclass
class _Packed:
    """A packed weight of a model: the node that unpacks it, and the scales that it has in the bundle."""

    node: ProtoNode
    scale: np.ndarray


def _fill_weights(
    graph: ProtoGraph,
    query: BundleQuery,
    array_of: ArrayOf,
    header: Mapping[str, Any],
    transposed: set[str],
    in_integers: bool,
) -> dict[str, _Packed]:
    """Give every initialiser its values; returns the packed ones by name."""
    packed: dict[str, _Packed] = {}
    for name, constant in list(graph.constants.items()):
        if constant.array is not None:
            continue
        key = key_of_weight(query, name)
        stored = query.stored.get(key)
        array = array_of(query.tensors[key])
        # Float32 or float16: a plain constant.
        if stored is None or stored.scale is None:
            wide = array if stored is None else array.astype(np.float32)
            graph.add_constant(name, np.ascontiguousarray(wide.T) if name in transposed else wide)
            continue
        shape = wide_shape(query, key, header[query.tensors[key]])
        scale = array_of(stored.scale)
        if stored.dtype == "int4":
            array = unpack_nibbles(array, shape)
        bits = "int8" if in_integers else stored.dtype
        packed[name] = _pack_behind_dequantise(graph, name, bits, array, scale, name in transposed)
    return packed


def _pack_behind_dequantise(
    graph: ProtoGraph,
    name: str,
    bits: Bits,
    codes: np.ndarray,
    scale: np.ndarray,
    is_transposed: bool,
) -> _Packed:
    """Let what read a weight read its codes, int8 of this shape, times the scales of its rows."""
    codes = np.ascontiguousarray(codes.T) if is_transposed else codes
    constant = Constant.of(codes)
    if bits == "int4":
        constant = Constant(_pack_signed(codes), onnx.TensorProto.INT4, codes.shape)
    inputs = [
        graph.add_constant(f"{name}.codes", constant),
        graph.add_constant(f"{name}.scale", scale),
    ]
    if bits == "int8":
        # ONNX Runtime fails without zeros where it makes codes unsigned, for processors whose products overflow.
        inputs.append(graph.add_constant(f"{name}.zero", np.zeros(len(scale), np.int8)))
    has_axis = graph.opset >= AXIS_OPSET and bits != "int4"
    axis = {"axis": 1 if is_transposed else 0}
    node = make_node(
        "DequantizeLinear", inputs, f"{name}.wide", axis, "" if has_axis else MICROSOFT
    )
    graph.sizes[node.outputs[0]] = graph.sizes[name]
    readers = graph.readers(name)
    first = next(reader for reader in graph.nodes if reader in readers)
    graph.insert_before(first, node)
    graph.replace_reads(name, node.outputs[0])
    return _Packed(node, scale)


def _pack_signed(codes: np.ndarray) -> np.ndarray:
    """Codes as ONNX packs INT4: two in a byte, in row-major order, the first in the low four bits."""
    flat = np.ascontiguousarray(codes).reshape(-1)
    if flat.size % 2:
        flat = np.append(flat, np.int8(0))
    low = flat[::2].astype(np.uint8) & 15
    high = flat[1::2].astype(np.uint8) & 15
    return low | high << 4


# Norms


def find_norms(
    graph: ProtoGraph, query: BundleQuery, contents: Mapping[str, str]
) -> Iterator[Norm]:
    """Norms that follow a convolution whose output nothing else reads."""
    outputs = graph.output_names
    for node in graph.nodes:
        if node.op_type != "BatchNormalization":
            continue
        source = node.inputs[0]
        conv = graph.producer(source)
        if (
            conv is None
            or conv.op_type != "Conv"
            or source in outputs
            or len(graph.readers(source)) > 1
        ):
            continue
        if any(
            value not in graph.constants
            for value in (*filter(None, conv.inputs[2:]), *node.inputs[1:])
        ):
            continue
        name = _weight_name(graph, conv.inputs[1])
        if name not in contents:
            continue
        key = key_of_weight(query, name)
        is_packed = key in query.stored and query.stored[key].scale is not None
        scale = [contents.get(value, value) for value in (node.inputs[1], node.inputs[4])]
        yield Norm(node, conv, contents[name], (*scale, repr(_epsilon(node))), is_packed)


def _epsilon(node: ProtoNode) -> float:
    return node.attribute("epsilon", 1e-5)


def _weight_name(graph: ProtoGraph, weight: str) -> str:
    """The initialiser of a convolution's weight, behind a DequantizeLinear or not."""
    source = graph.producer(weight)
    is_packed = source is not None and source.op_type == "DequantizeLinear"
    return weight.removesuffix(".wide") if is_packed else weight


def _convert_norms(
    graph: ProtoGraph,
    query: BundleQuery,
    uses: NormUses,
    contents: Mapping[str, str],
    packed: Mapping[str, _Packed],
) -> None:
    """Fold each norm into its convolution, in place, or make it a convolution itself where a fold costs too much.

    Folds that copy a shared weight are done in order of the values that the separate norm would have to read, for each
    weight, as far as MAX_COPIED_FRACTION goes.
    """
    norms = list(find_norms(graph, query, contents))
    sizes = {
        norm: graph.constants[norm.conv.inputs[1]].values for norm in norms if uses.copies(norm)
    }
    reads = {norm: _output_size(graph, norm.node) for norm in sizes}
    remaining_values = MAX_COPIED_FRACTION * sum(
        constant.values for constant in graph.constants.values()
    )
    separate: set[Norm] = set()
    for norm in sorted(sizes, key=lambda norm: -reads[norm] / sizes[norm]):
        # The norms that cost most come first, as far as the bytes go.
        if sizes[norm] <= remaining_values:
            remaining_values -= sizes[norm]
        else:
            separate.add(norm)
    constants = _SharedConstants(graph)
    for norm in norms:
        if norm in separate:
            _make_convolution(graph, norm, constants)
        else:
            _fold_norm(graph, norm, packed, constants)


def _output_size(graph: ProtoGraph, node: ProtoNode) -> int:
    """Values of a norm's output for one frame, as far as its shape is known; else as many as it has channels."""
    sizes = graph.sizes.get(node.outputs[0]) or graph.sizes.get(node.inputs[0]) or ()
    sides = [size for size in sizes[1:] if isinstance(size, int)]
    return math.prod(sides) if sides else graph.constants[node.inputs[1]].values


class _SharedConstants:
    """New initialisers of a graph, one for each key."""

    def __init__(self, graph: ProtoGraph) -> None:
        self._graph = graph
        self._names = dict[tuple[str, ...], str]()

    def add(self, key: tuple[str, ...], make: Callable[[], np.ndarray]) -> str:
        """The initialiser of a key, made of f32 values once."""
        if key not in self._names:
            values = np.ascontiguousarray(make(), np.float32)
            self._names[key] = self._graph.add_constant(f"prepared.{len(self._names)}", values)
        return self._names[key]


def _array(graph: ProtoGraph, name: str) -> np.ndarray:
    array = graph.constants[name].array
    assert array is not None
    return array


def _affine(graph: ProtoGraph, norm: Norm) -> tuple[np.ndarray, np.ndarray]:
    """Scale and shift of each channel, f32 (C,), the convolution's own bias included."""
    gamma, beta, mean, variance = (_array(graph, name) for name in norm.node.inputs[1:5])
    scale = gamma.astype(np.float64) / np.sqrt(variance.astype(np.float64) + _epsilon(norm.node))
    shift = beta - mean * scale
    if any(norm.conv.inputs[2:]):
        shift = shift + _array(graph, norm.conv.inputs[2]) * scale
    return scale.astype(np.float32), shift.astype(np.float32)


def _fold_norm(
    graph: ProtoGraph, norm: Norm, packed: Mapping[str, _Packed], constants: _SharedConstants
) -> None:
    node = norm.node
    conv = norm.conv
    weight = norm.conv.inputs[1]
    name = _weight_name(graph, weight)
    scale, shift = _affine(graph, norm)
    key = (name, *node.inputs[1:])
    stored = packed.get(name)
    # A packed weight keeps its codes: its scales take the norm.
    if stored is None:
        factors = scale.reshape(-1, *(1,) * (len(graph.sizes[weight]) - 1))
        folded = constants.add(("weight", *key), lambda: _array(graph, weight) * factors)
    else:
        scales = constants.add(("scale", *key), lambda: stored.scale * scale)
        codes, _, *zeros = stored.node.inputs
        folded = f"{conv.outputs[0]}.weight"
        clone = make_node(
            "DequantizeLinear", [codes, scales, *zeros], folded, {"axis": 0}, stored.node.domain
        )
        graph.insert_before(conv, clone)
        graph.sizes[folded] = graph.sizes[weight]
    bias = constants.add(("bias", *key, *conv.inputs[2:]), lambda: shift)
    graph.set_inputs(conv, (conv.inputs[0], folded, bias))
    graph.remove(node)
    graph.set_output(conv, node.outputs[0])


def _make_convolution(graph: ProtoGraph, norm: Norm, constants: _SharedConstants) -> None:
    """Put a convolution of one channel each in place of the norm."""
    node = norm.node
    conv = norm.conv
    scale, shift = _affine(graph, norm)
    sides = len(graph.sizes[conv.inputs[1]]) - 2
    key = (_weight_name(graph, conv.inputs[1]), *node.inputs[1:], *conv.inputs[2:])
    factors = constants.add(("factors", *key), lambda: scale.reshape(-1, *(1,) * (sides + 1)))
    shifts = constants.add(("shifts", *key), lambda: shift)
    graph.set_inputs(conv, conv.inputs[:2])
    attributes = {"group": len(scale), "kernel_shape": [1] * sides}
    channels = make_node("Conv", [conv.outputs[0], factors, shifts], node.outputs[0], attributes)
    place = graph.nodes.index(node)
    graph.remove(node)
    graph.insert(place, [channels])


def _widen_weights(graph: ProtoGraph) -> None:
    """Hold the weights of products that stay in float32 as such: ONNX Runtime would unpack them in every run."""
    for product in list_wide_products(graph):
        unpacking = graph.producer(product.inputs[1])
        assert unpacking is not None
        codes, scale = (_array(graph, name) for name in unpacking.inputs[:2])
        sides = [1] * codes.ndim
        sides[unpacking.attribute("axis", 0)] = -1
        weight = graph.add_constant(
            f"{product.outputs[0]}.wide_weight", codes * scale.reshape(sides)
        )
        graph.set_inputs(product, (product.inputs[0], weight, *product.inputs[2:]))


def _remove_unused(graph: ProtoGraph) -> None:
    for node in [node for node in graph.nodes if node.op_type == "DequantizeLinear"]:
        if not graph.readers(node.outputs[0]) and node.outputs[0] not in graph.output_names:
            graph.remove(node)
    graph.remove_unused_constants()
