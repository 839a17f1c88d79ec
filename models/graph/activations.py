"""Activations of a query's network in eight bits: which, in what ranges, and the graph that computes with them.

A product of a packed weight (int8, one scale for each output channel) and an activation in eight bits is computed in
integers, as ONNX Runtime does where both sides of an operator are dequantised (QDQ). Norms are in the scales of the
weights already (`query_graph`), so a weight that queries share keeps one copy of its codes. Ranges are measured on
frames (Krishnamoorthi 2018, section 3.1). Needs no torch.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from gemel.models.bundle.manifest import ActivationRange
from gemel.models.graph.proto_graph import ProtoGraph, ProtoNode, make_node

INPUT = "input"
"""The place of the frames; that of another value of a document is `NODE.OUTPUT`."""
WEIGHTED = ("Conv", "MatMul", "Gemm")
"""Operators that multiply by a weight."""
INTEGER_OPERATORS = frozenset({
    *WEIGHTED, "Add", "Mul", "Concat", "Sigmoid", "LeakyRelu", "MaxPool", "AveragePool", "GlobalAveragePool",
    "Relu", "Clip", "Resize", "Reshape", "Transpose", "Flatten", "Slice", "Split",
})  # fmt: skip
"""Operators that ONNX Runtime computes on codes, or that only move values."""
FUSED = ("Relu", "Clip")
"""Activations that become part of the operator before them: nothing is quantised between the two."""
EXACT_PRODUCTS = "session.x64quantprecision"
"""The entry of a session's config by which products of uint8 and int8 do not overflow; it takes twice the time."""
LEVELS = 255
"""Steps of the codes of an activation, uint8."""
MIN_SCALE = 1e-12


def use_exact_products(options: Any) -> None:
    """Let sessions of these onnxruntime.SessionOptions compute products exactly, where the processor would overflow."""
    options.add_session_config_entry(EXACT_PRODUCTS, str(int(_overflows_products())))


def _overflows_products() -> bool:
    """Whether this processor adds products of uint8 and int8 in 16 bits: x86-64 without VNNI."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True
    return "avx512_vnni" not in flags and "avx_vnni" not in flags


def name_places(document: onnx.ModelProto) -> dict[str, str]:
    """Where each value of a document is, by name; values keep their names in all that follows."""
    places = {document.graph.input[0].name: INPUT}
    for number, node in enumerate(document.graph.node):
        places.update((name, f"{number}.{output}") for output, name in enumerate(node.output))
    return places


def find_activations(graph: ProtoGraph, places: Mapping[str, str]) -> list[str]:
    """The values of a query's graph to be held in eight bits, in order; `places` are those of `name_places`.

    They are what integer operators read or give, on the way to a packed product: what follows the last one, such as the
    places of boxes, keeps its precision.
    """
    leads_to_product = _values_before_products(graph)
    values: dict[str, None] = {}
    for node in graph.nodes:
        if not _is_integer(graph, node):
            continue
        for value in (*node.inputs, *node.outputs):
            if value in leads_to_product and value in places:
                values[value] = None
    return [value for value in values if not _is_fused(graph, value)]


def _values_before_products(graph: ProtoGraph) -> set[str]:
    """The activations that a product with a packed weight depends on."""
    values: set[str] = set()
    for node in reversed(graph.nodes):
        if _is_packed_product(graph, node) or any(output in values for output in node.outputs):
            values.update(filter(None, node.inputs))
    return values


def _is_integer(graph: ProtoGraph, node: ProtoNode) -> bool:
    if node.op_type in WEIGHTED:
        return _is_packed_product(graph, node)
    return node.op_type in INTEGER_OPERATORS


def _is_packed_product(graph: ProtoGraph, node: ProtoNode) -> bool:
    if node.op_type not in WEIGHTED:
        return False
    source = graph.producer(node.inputs[1])
    if source is None or source.op_type != "DequantizeLinear":
        return False
    codes = graph.constants.get(source.inputs[0])
    return codes is not None and codes.data_type == onnx.TensorProto.INT8


def _is_fused(graph: ProtoGraph, value: str) -> bool:
    source, users = graph.producer(value), set(graph.readers(value))
    if source is None or source.op_type not in (*WEIGHTED, "Add") or len(users) != 1:
        return False
    return next(iter(users)).op_type in FUSED


def measure_ranges(
    graph: ProtoGraph, places: Mapping[str, str], frames: Iterable[np.ndarray]
) -> dict[str, ActivationRange]:
    """The least and largest value of each activation over batches of frames, by place; 0 is within every range.

    Values of other types than float32 have none; none has where no product has a packed weight. Takes one run for
    each batch, with all of the activations in memory.
    """
    import onnxruntime

    names = {value: places[value] for value in find_activations(graph, places)}
    if not names:
        return {}
    proto = graph.to_proto()
    wanted = [name for name in names if name not in graph.output_names]
    inputs = {entry.name for entry in proto.graph.input}
    for name in wanted:
        if name not in inputs:
            proto.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    outputs, entrance = [output.name for output in session.get_outputs()], session.get_inputs()[0].name
    ranges: dict[str, ActivationRange] = {}
    for batch in frames:
        answers: list[Any] = [batch, *session.run(None, {entrance: batch})]
        for name, array in zip([entrance, *outputs], answers, strict=True):
            if name not in names or array.dtype != np.float32 or not array.size:
                continue
            low, high = ranges.get(names[name], (0.0, 0.0))
            ranges[names[name]] = (min(low, float(array.min())), max(high, float(array.max())))
    return {place: one for place, one in ranges.items() if np.isfinite(one).all()}


def quantize_activations(graph: ProtoGraph, places: Mapping[str, str], ranges: Mapping[str, ActivationRange]) -> None:
    """Let the integer operators of a query's graph compute on codes, where the range of an activation is known."""
    for number, value in enumerate(find_activations(graph, places)):
        place = places[value]
        if place not in ranges or not graph.readers(value):
            continue
        scale, zero = _codes_of(ranges[place])
        name = f"activation.{number}"
        scales = graph.add_constant(f"{name}.scale", np.array(scale, np.float32))
        zeros = graph.add_constant(f"{name}.zero", np.array(zero, np.uint8))
        codes = make_node("QuantizeLinear", [value, scales, zeros], f"{name}.codes")
        wide = make_node("DequantizeLinear", [codes.outputs[0], scales, zeros], f"{name}.wide")
        graph.replace_reads(value, wide.outputs[0])
        source = graph.producer(value)
        graph.insert(0 if source is None else graph.nodes.index(source) + 1, [codes, wide])


def _codes_of(limits: ActivationRange) -> tuple[float, int]:
    """The scale, and the code of zero."""
    low, high = min(limits[0], 0.0), max(limits[1], 0.0)
    scale = max((high - low) / LEVELS, MIN_SCALE)
    return scale, int(np.clip(round(-low / scale), 0, LEVELS))
