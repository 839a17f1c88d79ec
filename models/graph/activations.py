"""Activations of a query's network in eight bits: which, in what ranges, and the graph that computes with them.

A product of a packed weight (int8, one scale for each output channel) and an activation in eight bits is computed in
integers, as ONNX Runtime does where both sides of an operator are dequantised (QDQ). Norms are in the scales of the
weights already (`query_graph`), so a weight that queries share keeps one copy of its codes. Ranges are measured on
frames (Krishnamoorthi 2018, section 3.1). Needs no torch.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
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
GATES = "gates"
"""The input by which `measure_errors` holds some activations in eight bits, f32 from 0 to 1."""


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

    They are what integer operators read or give, on the way to a product: what follows the last one, such as the places
    of boxes, keeps its precision.
    """
    leads_to_product = _values_before(
        graph, [node for node in graph.nodes if node.op_type in WEIGHTED]
    )
    values: dict[str, None] = {}
    for node in graph.nodes:
        if not _is_integer(graph, node):
            continue
        for value in (*node.inputs, *node.outputs):
            if value in leads_to_product and value in places:
                values[value] = None
    return [value for value in values if not _is_fused(graph, value)]


def _values_before(graph: ProtoGraph, products: Sequence[ProtoNode]) -> set[str]:
    """The activations that these products depend on."""
    values: set[str] = set()
    for node in reversed(graph.nodes):
        if node in products or any(output in values for output in node.outputs):
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
    source = graph.producer(value)
    users = set(graph.readers(value))
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
    names = {value: places[value] for value in find_activations(graph, places)}
    if not names:
        return {}
    session = _PlainSession(graph, names)
    ranges: dict[str, ActivationRange] = {}
    for batch in frames:
        for name, array in {session.input: batch, **session.run(batch)}.items():
            if name not in names or array.dtype != np.float32 or not array.size:
                continue
            low, high = ranges.get(names[name], (0.0, 0.0))
            ranges[names[name]] = (min(low, float(array.min())), max(high, float(array.max())))
    return {place: limits for place, limits in ranges.items() if np.isfinite(limits).all()}


def measure_errors(
    graph: ProtoGraph,
    places: Mapping[str, str],
    ranges: Mapping[str, ActivationRange],
    frame: np.ndarray,
) -> dict[str, float]:
    """How far each activation alone, held in eight bits, moves what the heads of a network read, by place.

    Mean squares over a frame f32 (1, 3, H, W), in parts of the variance of each input of a head; of the outputs where
    no head follows the last packed product. `graph` is changed. Takes a run for each activation.
    """
    switched = _add_switches(graph, places, ranges)
    heads = _head_inputs(graph) or list(graph.output_names)
    session = _PlainSession(graph, heads)
    wide = session.run(frame, {GATES: np.zeros(len(switched), np.float32)})
    spreads = {name: max(float(wide[name].var()), MIN_SCALE) for name in heads}
    errors = dict.fromkeys(ranges, 0.0)
    for place, gates in zip(switched, np.eye(len(switched), dtype=np.float32), strict=True):
        moved = session.run(frame, {GATES: gates})
        errors[place] = sum(
            float(np.square(moved[name] - wide[name]).mean()) / spreads[name] for name in heads
        )
    return errors


def _head_inputs(graph: ProtoGraph) -> list[str]:
    """What the products after the last packed ones read."""
    packed = [node for node in graph.nodes if _is_packed_product(graph, node)]
    before_packed = _values_before(graph, packed)
    wide = [node for node in graph.nodes if node.op_type in WEIGHTED and node not in packed]
    return list(
        dict.fromkeys(node.inputs[0] for node in wide if node.outputs[0] not in before_packed)
    )


def _add_switches(
    graph: ProtoGraph, places: Mapping[str, str], ranges: Mapping[str, ActivationRange]
) -> list[str]:
    """Let each activation be held in eight bits by a gate from 0 to 1, an input of the graph; returns their places."""
    switched: list[str] = []
    for value in find_activations(graph, places):
        if places[value] not in ranges or not graph.readers(value):
            continue
        name = f"switch.{len(switched)}"
        place = graph.add_constant(f"{name}.place", np.array(len(switched), np.int64))
        coding = _coding_nodes(graph, value, name, ranges[places[value]])
        mixing = [
            make_node("Gather", [GATES, place], f"{name}.gate"),
            make_node("Sub", [coding[1].outputs[0], value], f"{name}.error"),
            make_node("Mul", [f"{name}.error", f"{name}.gate"], f"{name}.change"),
            make_node("Add", [value, f"{name}.change"], f"{name}.mixed"),
        ]
        _insert_after(graph, value, [*coding, *mixing])
        switched.append(places[value])
    graph.inputs.append(
        onnx.helper.make_tensor_value_info(GATES, onnx.TensorProto.FLOAT, [len(switched)])
    )
    return switched


class _PlainSession:
    """A graph as it is, with further values as outputs, on one frame or batch after the other."""

    def __init__(self, graph: ProtoGraph, names: Iterable[str]) -> None:
        import onnxruntime

        proto = graph.to_proto()
        outputs = {*graph.output_names, *(entry.name for entry in proto.graph.input)}
        proto.graph.output.extend(
            map(onnx.helper.make_empty_tensor_value_info, [n for n in names if n not in outputs])
        )
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 3
        data = proto.SerializeToString()
        self._session = onnxruntime.InferenceSession(
            data, options, providers=["CPUExecutionProvider"]
        )
        self._outputs = [output.name for output in self._session.get_outputs()]
        self.input = proto.graph.input[0].name

    def run(
        self, batch: np.ndarray, more: Mapping[str, np.ndarray] | None = None
    ) -> dict[str, np.ndarray]:
        """All outputs by name."""
        answers: Any = self._session.run(None, {self.input: batch, **(more or {})})
        return dict(zip(self._outputs, answers, strict=True))


def quantize_activations(
    graph: ProtoGraph, places: Mapping[str, str], ranges: Mapping[str, ActivationRange]
) -> None:
    """Let the integer operators of a query's graph compute on codes, where the range of an activation is known."""
    for number, value in enumerate(find_activations(graph, places)):
        if places[value] in ranges and graph.readers(value):
            _insert_after(
                graph,
                value,
                _coding_nodes(graph, value, f"activation.{number}", ranges[places[value]]),
            )


def _insert_after(graph: ProtoGraph, value: str, nodes: Sequence[ProtoNode]) -> None:
    """Put nodes behind a value, so that what read it, but for its shape, reads what the last of them gives."""
    source = graph.producer(value)
    shapes = [reader for reader in graph.readers(value) if reader.op_type == "Shape"]
    graph.replace_reads(value, nodes[-1].outputs[0])
    for reader in shapes:
        graph.set_inputs(reader, (value,))
    graph.insert(0 if source is None else graph.nodes.index(source) + 1, nodes)


def _coding_nodes(
    graph: ProtoGraph, value: str, name: str, limits: ActivationRange
) -> list[ProtoNode]:
    """The nodes that hold a value in eight bits: to codes, and back."""
    scale, zero = _codes_of(limits)
    scales = graph.add_constant(f"{name}.scale", np.array(scale, np.float32))
    zeros = graph.add_constant(f"{name}.zero", np.array(zero, np.uint8))
    codes = make_node("QuantizeLinear", [value, scales, zeros], f"{name}.codes")
    return [codes, make_node("DequantizeLinear", [codes.outputs[0], scales, zeros], f"{name}.wide")]


def list_wide_products(graph: ProtoGraph) -> list[ProtoNode]:
    """The products of packed weights that are computed in float32, since what they read or give is no code."""
    products = (node for node in graph.nodes if _is_packed_product(graph, node))
    return [node for node in products if not _is_computed(graph, node)]


def _is_computed(graph: ProtoGraph, product: ProtoNode) -> bool:
    source = graph.producer(product.inputs[0])
    if source is None or source.op_type != "DequantizeLinear":
        return False
    readers = graph.readers(product.outputs[0])
    while len(readers) == 1 and readers[0].op_type in FUSED:
        readers = graph.readers(readers[0].outputs[0])
    return bool(readers) and all(reader.op_type == "QuantizeLinear" for reader in readers)


def _codes_of(limits: ActivationRange) -> tuple[float, int]:
    """The scale, and the code of zero."""
    low = min(limits[0], 0.0)
    high = max(limits[1], 0.0)
    scale = max((high - low) / LEVELS, MIN_SCALE)
    return scale, int(np.clip(round(-low / scale), 0, LEVELS))
