"""Graphs of sessions: one for all queries of an architecture, in which what they have in common is constant.

The rest are inputs. A norm is folded into its convolution wherever that leaves the convolution's weights constant, or
costs few bytes for each query; elsewhere it follows as a convolution of one weight and one bias for each channel.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from models.export import INPUT
from models.process import quiet

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

    from models.bundle import Bundle, BundleQuery

NETWORK = "network."
"""Begins the state dict keys of a graph that came as a file."""
FLOAT = 1
"""TensorProto.FLOAT."""


@dataclass(frozen=True)
class SessionLimits:
    """When queries share a session.

    `private_fraction`: tied weights are folded for each query while all that is private takes at most this part of the
    constant bytes and the largest layer's values, so that four queries stay below 1.10 of one. `min_tied_fraction`: a
    query with less in common with a session gets its own, in which all of its weights are constant.
    """

    private_fraction: float = 0.025
    min_tied_fraction: float = 0.5


LIMITS = SessionLimits()


class UnequalGraphs(Exception):
    """The optimised graphs of two queries differ in more than values."""


def query_groups(bundle: Bundle, queries: Sequence[BundleQuery], limits: SessionLimits = LIMITS) -> list[list[str]]:
    """Queries of one architecture by session: each has enough in common with all others of its session."""
    groups: list[tuple[list[str], dict[str, str]]] = []
    for query in queries:
        own = query.places()
        nbytes = _unique_bytes(bundle, own)
        best, tied = None, {}
        for group in groups:
            common = {key: name for key, name in group[1].items() if own.get(key) == name}
            if best is None or _unique_bytes(bundle, common) > _unique_bytes(bundle, tied):
                best, tied = group, common
        if best is not None and _unique_bytes(bundle, tied) >= limits.min_tied_fraction * nbytes:
            best[0].append(query.id)
            best[1].clear()
            best[1].update(tied)
        else:
            groups.append(([query.id], dict(own)))
    return [ids for ids, _ in groups]


def _unique_bytes(bundle: Bundle, tensors: Mapping[str, str]) -> int:
    return sum(map(bundle.nbytes, set(tensors.values())))


def private_keys(queries: Sequence[BundleQuery]) -> set[str]:
    """The state dict keys at which queries of one architecture differ."""
    first, *others = (query.places() for query in queries)
    return {key for key in first if any(own.get(key) != first[key] for own in others)}


def filled_graphs(bundle: Bundle, queries: Sequence[BundleQuery], skeleton: bytes) -> Iterator[ir.Model]:
    """The graph of each query with its weights, norms folded or as convolutions: alike but for values.

    `skeleton` is the graph of their architecture: as `graph_without_weights` makes it, or a bundle's own document.
    """
    prefix = "" if queries[0].graph is None else NETWORK
    private = {key.removeprefix(prefix) for key in private_keys(queries)}
    for query in queries:
        model = _fill(skeleton, lambda key: _read(bundle, query, f"{prefix}{key}"), query.graph is not None)  # noqa: B023
        convert_norms(model, private)
        yield model


def _read(bundle: Bundle, query: BundleQuery, key: str) -> Tensor:
    """A tensor in float32; OSError when its bytes are no longer those that were verified."""
    return bundle.wide_tensor(query.id, key) if key in query.stored else bundle.read(query.tensors[key])


def _fill(skeleton: bytes, tensor_of: Callable[[str], Tensor], is_document: bool) -> ir.Model:
    import onnx_ir as ir
    from onnx_ir.passes.common import ShapeInferencePass

    from models.graph.document import parse_model
    from models.graph.stored import transposed_weights
    from models.graph.unfold import WHERE, is_weight

    transposed: Collection[str] = ()
    if is_document:
        model = parse_model(skeleton, WHERE)
        ShapeInferencePass()(model)  # a document has the shapes of its input and outputs alone
        transposed = transposed_weights(model)
        values = [value for value in model.graph.initializers.values() if is_weight(value)]
    else:
        model = ir.from_proto(_proto(skeleton))
        values = [value for value in model.graph.inputs if value.name != INPUT]
        model.graph.inputs[:] = [value for value in model.graph.inputs if value.name == INPUT]
    for value in values:
        tensor = tensor_of(str(value.name)).detach()
        tensor = tensor.t() if value.name in transposed else tensor
        value.const_value = ir.tensor(tensor.contiguous().numpy(), name=value.name)
        if not is_document:
            model.graph.register_initializer(value)
    return model


def _proto(data: bytes) -> onnx.ModelProto:
    import onnx

    return onnx.load_from_string(data)


# Norms


@dataclass(frozen=True)
class _Norm:
    """A norm and the convolution before it; `is_private`: its scale is, and the convolution's weight is not."""

    conv: ir.Node
    norm: ir.Node
    is_private: bool
    weights: int
    outputs: int


def convert_norms(model: ir.Model, private: Collection[str], limits: SessionLimits = LIMITS) -> None:
    """Fold each norm into its convolution, in place, or make it a convolution itself where a fold costs too much.

    A fold makes weights private that are not in `private` where the norm's scale is. It is done in order of the values
    that the separate norm would have to read, for each weight, as far as the limit goes.
    """
    found = list(_find_norms(model.graph, private))
    sizes = {str(value.name): _size(value) for value in model.graph.initializers.values()}
    unavoidable = sum(size for name, size in sizes.items() if name in private)
    shared = sum(sizes.values()) - unavoidable + 2 * max((one.outputs for one in found), default=0)
    left = limits.private_fraction * shared - unavoidable
    apart: set[ir.Node] = set()
    for one in sorted(found, key=lambda one: -one.outputs / one.weights):
        if not one.is_private:
            continue
        if one.weights <= left:
            left -= one.weights
        else:
            apart.add(one.norm)
    folded: dict[tuple[Any, ...], ir.Value] = {}
    for one in found:
        if one.norm in apart:
            _make_convolution(model.graph, one, folded)
        else:
            _fold(model.graph, one, folded)
    for value in [value for value in model.graph.initializers.values() if not list(value.uses())]:
        del model.graph.initializers[str(value.name)]


def _size(value: ir.Value) -> int:
    return math.prod(value.const_value.shape.numpy()) if value.const_value is not None else 0


def _find_norms(graph: ir.Graph, private: Collection[str]) -> Iterator[_Norm]:
    """Norms that follow a convolution whose output nothing else reads."""
    outputs = set(graph.outputs)
    for node in graph:
        source = node.inputs[0] if node.op_type == "BatchNormalization" else None
        conv = source.producer() if source is not None else None
        if conv is None or source is None or conv.op_type != "Conv" or source in outputs or len(source.uses()) > 1:
            continue
        values = [value for value in (*conv.inputs[1:], *node.inputs[1:]) if value is not None]
        if any(value.const_value is None for value in values) or len(conv.inputs[1].const_value.shape) != 4:  # type: ignore[union-attr]
            continue
        weight = conv.inputs[1]
        assert weight is not None
        changes = any(value is not None and value.name in private for value in (node.inputs[1], node.inputs[4]))
        shape = node.outputs[0].shape or source.shape
        sizes = [size for size in list(shape or ())[1:] if isinstance(size, int)]
        yield _Norm(conv, node, changes and weight.name not in private, _size(weight), math.prod(sizes))


def _affine(one: _Norm) -> tuple[np.ndarray, np.ndarray]:
    """Scale and shift of each channel, f32 (C,), the convolution's own bias included."""
    gamma, beta, mean, variance = (value.const_value.numpy() for value in one.norm.inputs[1:5])  # type: ignore[union-attr]
    epsilon = one.norm.attributes.get_float("epsilon", 1e-5)
    scale = gamma.astype(np.float64) / np.sqrt(variance.astype(np.float64) + epsilon)
    shift = beta - mean * scale
    bias = one.conv.inputs[2] if len(one.conv.inputs) > 2 else None
    if bias is not None:
        shift = shift + bias.const_value.numpy() * scale  # type: ignore[union-attr]
    return scale.astype(np.float32), shift.astype(np.float32)


def _constant(
    graph: ir.Graph, known: dict[tuple[Any, ...], ir.Value], key: tuple[Any, ...], values: np.ndarray
) -> ir.Value:
    """An initialiser of these values, made once for a key."""
    import onnx_ir as ir

    if key not in known:
        tensor = ir.tensor(np.ascontiguousarray(values), name=f"session.{len(known)}")
        shape, kind = ir.Shape(values.shape), ir.TensorType(tensor.dtype)
        value = ir.Value(name=tensor.name, shape=shape, type=kind, const_value=tensor)
        graph.register_initializer(value)
        known[key] = value
    return known[key]


def _fold(graph: ir.Graph, one: _Norm, known: dict[tuple[Any, ...], ir.Value]) -> None:
    scale, shift = _affine(one)
    weight = one.conv.inputs[1]
    assert weight is not None
    key = (weight, *one.norm.inputs[1:])
    folded = weight.const_value.numpy() * scale.reshape(-1, 1, 1, 1)  # type: ignore[union-attr]
    one.conv.replace_input_with(1, _constant(graph, known, ("weight", *key), folded))
    one.conv.resize_inputs(3)
    one.conv.replace_input_with(2, _constant(graph, known, ("bias", *key), shift))
    _replace_output(graph, one.norm, one.conv)


def _make_convolution(graph: ir.Graph, one: _Norm, known: dict[tuple[Any, ...], ir.Value]) -> None:
    """Put a convolution of one channel each in place of the norm, which engines fuse with what follows."""
    import onnx_ir as ir

    scale, shift = _affine(one)
    key = (one.conv.inputs[1], *one.norm.inputs[1:])
    one.conv.resize_inputs(2)
    inputs = [
        one.conv.outputs[0],
        _constant(graph, known, ("scale", *key), scale.reshape(-1, 1, 1, 1)),
        _constant(graph, known, ("shift", *key), shift),
    ]
    made = ir.node("Conv", inputs, {"group": len(scale), "kernel_shape": [1, 1]}, name=f"{one.norm.name}.channels")
    graph.insert_before(one.norm, made)
    _replace_output(graph, one.norm, made)


def _replace_output(graph: ir.Graph, node: ir.Node, by: ir.Node) -> None:
    """Let `by` give what the node gave, and remove the node."""
    old, new = node.outputs[0], by.outputs[0]
    name = old.name
    new.shape, new.type = old.shape, old.type
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    new.name = name


# Splitting


@dataclass(frozen=True)
class SharedGraph:
    """A graph in which what differs between queries are inputs, and their values for each query."""

    model: onnx.ModelProto
    inputs: tuple[dict[str, np.ndarray], ...]

    @property
    def constant_bytes(self) -> int:
        """The bytes of what is in the graph."""
        return sum(len(one.raw_data) for one in self.model.graph.initializer)

    @property
    def private_bytes(self) -> int:
        """The bytes of one query's inputs."""
        return sum(value.nbytes for value in self.inputs[0].values())


def share_graph(models: Iterator[onnx.ModelProto]) -> SharedGraph:
    """One graph for all; the values in which any differs from the first are inputs. Raises UnequalGraphs."""
    from onnx import helper, numpy_helper

    first = next(models)
    values = {one.name: one for one in first.graph.initializer}
    nodes, differing = _nodes(first), [dict[str, np.ndarray]()]
    for model in models:
        own = {one.name: one for one in model.graph.initializer}
        if _nodes(model) != nodes or own.keys() != values.keys():
            raise UnequalGraphs
        changed = [name for name, one in own.items() if one.SerializeToString() != values[name].SerializeToString()]
        differing.append({name: numpy_helper.to_array(own[name]).copy() for name in changed})
        if any(own[name].data_type != FLOAT or own[name].dims != values[name].dims for name in changed):
            raise UnequalGraphs
    names = sorted({name for own in differing for name in own})
    known = {name: numpy_helper.to_array(values[name]).copy() for name in names}
    for name in names:
        first.graph.initializer.remove(values[name])
        first.graph.input.append(helper.make_tensor_value_info(name, FLOAT, known[name].shape))
    return SharedGraph(first, tuple({**known, **own} for own in differing))


def _nodes(model: onnx.ModelProto) -> list[bytes]:
    """What the nodes compute, without their names and order, which ONNX Runtime chooses by chance."""
    found = []
    for node in model.graph.node:
        node.ClearField("name")
        found.append(node.SerializeToString(deterministic=True))
    return sorted(found)


def optimised_graph(model: ir.Model, threads: int) -> onnx.ModelProto:
    """The graph as ONNX Runtime's CPU kernels take it: fused, weights packed for this CPU."""
    import onnx
    import onnx_ir as ir
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    options.add_session_config_entry("session.disable_prepacking", "1")
    with tempfile.TemporaryDirectory(prefix="gemel-") as folder, quiet():
        options.optimized_model_filepath = str(Path(folder) / "optimised.onnx")
        data = ir.to_proto(model).SerializeToString()
        onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        return onnx.load(options.optimized_model_filepath)
