"""Puts the bodies of a gated model's functions in the places of their calls, in linear time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import onnx

from gemel.models.errors import InputError, size_text
from gemel.models.graph.document_bounds import HINT

LOCAL = "local"
"""The domain of a file's own functions."""
MAX_COPIED_BYTES, COPIED_PER_BYTE = 2**26, 4
"""Of the constants in all places of functions: this many, and more for each byte of the functions."""


class Numbers(Protocol):
    """Gives values new numbers."""

    def copy(self, number: str) -> str:
        """The number of another value, which the file calls as it calls this one."""
        ...


def inline_functions(model: onnx.ModelProto, numbers: Numbers, where: str) -> None:
    """Replace each call of a local function by its nodes, in place, and remove the functions.

    Raises InputError for calls that do not fit, and where the copies would be large.
    """
    if not model.functions:
        return
    inlining = _Inlining(model.functions, numbers, where)
    inlining.expand_graph(model.graph)
    del model.functions[:]


Attributes = Mapping[str, onnx.AttributeProto]


class _Inlining:
    def __init__(
        self, functions: Iterable[onnx.FunctionProto], numbers: Numbers, where: str
    ) -> None:
        self.functions = {function.name: function for function in functions}
        self.numbers = numbers
        self.where = where
        sizes = sum(function.ByteSize() for function in self.functions.values())
        self.max_bytes = MAX_COPIED_BYTES + COPIED_PER_BYTE * sizes
        self.copied_bytes = 0

    def expand_graph(self, graph: onnx.GraphProto) -> None:
        """Expand the calls of a graph and of its branches."""
        nodes: list[onnx.NodeProto] = []
        self.expand_nodes(graph.node, nodes)
        del graph.node[:]
        graph.node.extend(nodes)

    def expand_nodes(self, nodes: Iterable[onnx.NodeProto], expanded: list[onnx.NodeProto]) -> None:
        for node in nodes:
            if node.domain == LOCAL:
                self.expand_call(node, expanded)
                continue
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    self.expand_graph(attribute.g)
            expanded.append(node)

    def expand_call(self, call: onnx.NodeProto, expanded: list[onnx.NodeProto]) -> None:
        """Append what a call computes."""
        function = self.functions[call.op_type]
        if len(call.input) > len(function.input) or len(call.output) > len(function.output):
            raise InputError(
                self.where, "a call of one of its functions has more values than the function", HINT
            )
        values = dict.fromkeys(function.input, "")
        values.update(zip(function.input, call.input))
        bridges = []
        for inner, outer in zip(function.output, call.output):
            if inner in values and outer:  # an input, or an output that is given twice
                bridges.append((inner, outer))
            elif outer:
                values[inner] = outer
        attributes = {
            attribute.name: attribute for attribute in (*function.attribute_proto, *call.attribute)
        }
        copies = [self.copy_node(node, values, attributes) for node in function.node]
        self.expand_nodes(copies, expanded)
        for inner, outer in bridges:
            expanded.append(
                onnx.NodeProto(op_type="Identity", input=[values[inner]], output=[outer])
            )

    def copy_node(
        self, node: onnx.NodeProto, values: dict[str, str], attributes: Attributes
    ) -> onnx.NodeProto:
        """A node of a function for one call: `values` has the numbers that the call gives its values."""
        self.copied_bytes += node.ByteSize()
        if self.copied_bytes > self.max_bytes:
            problem = f"its functions would fill more than {size_text(self.max_bytes)} where they are called"
            raise InputError(self.where, problem, HINT)
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        self.renumber(copy, values)
        removed = []
        for place, attribute in enumerate(copy.attribute):
            if not attribute.ref_attr_name:
                continue
            value = attributes.get(attribute.ref_attr_name)
            if value is None:
                removed.append(place)  # a parameter that the call leaves out
                continue
            name = attribute.name
            attribute.CopyFrom(value)
            attribute.name = name
        for place in reversed(removed):
            del copy.attribute[place]
        for attribute in copy.attribute:
            if attribute.HasField("g"):
                self.copy_branch(attribute.g, values, attributes)
        return copy

    def copy_branch(
        self, graph: onnx.GraphProto, values: dict[str, str], attributes: Attributes
    ) -> None:
        """Renumber a branch within a function in place."""
        for info in (*graph.input, *graph.output, *graph.initializer):
            info.name = self.value(info.name, values)
        nodes = [self.copy_node(node, values, attributes) for node in graph.node]
        del graph.node[:]
        graph.node.extend(nodes)

    def renumber(self, node: onnx.NodeProto, values: dict[str, str]) -> None:
        node.input[:] = [self.value(number, values) for number in node.input]
        node.output[:] = [self.value(number, values) for number in node.output]

    def value(self, number: str, values: dict[str, str]) -> str:
        if number and number not in values:
            values[number] = self.numbers.copy(number)
        return values.get(number, "")
