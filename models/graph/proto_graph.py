"""A graph of ONNX messages that can be edited: its nodes in order, its constants as arrays, who reads a value by name.

Needs neither torch nor onnx_ir, so that a box does without them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

Sizes = tuple[int | str, ...]
"""The sizes of a value's axes; one that is open has a name, which may be empty. Nodes have "" for what is left out."""
LINE_BYTES = 64
"""At a multiple of which each constant of a file of weights begins."""


@dataclass(eq=False)
class ProtoNode:
    """An operator; `inputs` are changed by `ProtoGraph.set_inputs` alone."""

    op_type: str
    inputs: tuple[str, ...]
    outputs: list[str]
    attributes: dict[str, onnx.AttributeProto] = field(default_factory=dict)
    domain: str = ""
    name: str = ""

    def attribute(self, name: str, default: Any) -> Any:
        """The value of an attribute."""
        return (
            helper.get_attribute_value(self.attributes[name])
            if name in self.attributes
            else default
        )

    def to_proto(self) -> onnx.NodeProto:
        proto = onnx.NodeProto(op_type=self.op_type, domain=self.domain, name=self.name)
        proto.input.extend(self.inputs)
        proto.output.extend(self.outputs)
        proto.attribute.extend(self.attributes.values())
        return proto


@dataclass(frozen=True)
class Constant:
    """An initialiser: `array` is None where its values are elsewhere; `data_type` is TensorProto's number."""

    array: np.ndarray | None
    data_type: int
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: np.ndarray) -> Constant:
        """A constant of an array's values."""
        return cls(array, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)

    @property
    def values(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)

    def describe(self, name: str) -> onnx.TensorProto:
        """A tensor message without values."""
        return onnx.TensorProto(name=name, data_type=self.data_type, dims=self.shape)


class ProtoGraph:
    """The main graph of a model, which is left as it is.

    `constants` are the initialisers by name, `sizes` what is known of the axes of values.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self.inputs = list(graph.input)
        self.outputs = list(graph.output)
        self.metadata = {entry.key: entry.value for entry in model.metadata_props}
        self.opsets = {entry.domain: entry.version for entry in model.opset_import}
        self._ir_version = model.ir_version
        self._value_infos = list(graph.value_info)
        self.constants = {tensor.name: _read_constant(tensor) for tensor in graph.initializer}
        self.sizes: dict[str, Sizes] = {
            name: constant.shape for name, constant in self.constants.items()
        }
        for info in (*self._value_infos, *self.inputs, *self.outputs):
            if info.type.tensor_type.HasField("shape"):
                axes = info.type.tensor_type.shape.dim
                self.sizes[info.name] = tuple(
                    axis.dim_value if axis.HasField("dim_value") else axis.dim_param
                    for axis in axes
                )
        self.nodes: list[ProtoNode] = []
        self._readers: dict[str, list[ProtoNode]] = {}
        self._producers: dict[str, ProtoNode] = {}
        self.insert(0, [_read_node(node) for node in graph.node])

    @property
    def output_names(self) -> set[str]:
        return {output.name for output in self.outputs}

    @property
    def opset(self) -> int:
        """The version of ONNX's own operators."""
        return self.opsets.get("", self.opsets.get("ai.onnx", 0))

    @property
    def constant_bytes(self) -> int:
        """Of all initialisers."""
        return sum(
            constant.array.nbytes
            for constant in self.constants.values()
            if constant.array is not None
        )

    def producer(self, name: str) -> ProtoNode | None:
        """The node that gives a value."""
        return self._producers.get(name)

    def readers(self, name: str) -> list[ProtoNode]:
        """The nodes that read a value, each as often as it does."""
        return list(self._readers.get(name, ()))

    def insert(self, place: int, nodes: Sequence[ProtoNode]) -> None:
        """Put nodes before the one at a place."""
        self.nodes[place:place] = nodes
        for node in nodes:
            for name in filter(None, node.inputs):
                self._readers.setdefault(name, []).append(node)
            for name in filter(None, node.outputs):
                self._producers[name] = node

    def insert_before(self, node: ProtoNode, *nodes: ProtoNode) -> None:
        self.insert(self.nodes.index(node), nodes)

    def remove(self, node: ProtoNode) -> None:
        self.set_inputs(node, ())
        self.nodes.remove(node)
        for name in node.outputs:
            if self._producers.get(name) is node:
                del self._producers[name]

    def set_inputs(self, node: ProtoNode, names: Sequence[str]) -> None:
        """Let a node read these values."""
        for name in filter(None, node.inputs):
            self._readers[name].remove(node)
        node.inputs = tuple(names)
        for name in filter(None, node.inputs):
            self._readers.setdefault(name, []).append(node)

    def set_output(self, node: ProtoNode, name: str) -> None:
        """Let the first output of a node have this name, which no other node gives."""
        self._producers.pop(node.outputs[0], None)
        node.outputs[0] = name
        self._producers[name] = node

    def replace_reads(self, old: str, new: str) -> None:
        """Let all nodes that read a value read another one."""
        for node in dict.fromkeys(self.readers(old)):
            self.set_inputs(node, [new if name == old else name for name in node.inputs])

    def rename(self, names: Mapping[str, str]) -> None:
        """Give constants and what nodes give other names, which nothing has."""
        self.constants = {
            names.get(name, name): constant for name, constant in self.constants.items()
        }
        for old, new in names.items():
            if old in self.sizes:
                self.sizes[new] = self.sizes.pop(old)
            node = self._producers.pop(old, None)
            if node is not None:
                node.outputs = [new if name == old else name for name in node.outputs]
                self._producers[new] = node
            self.replace_reads(old, new)

    def forget_sizes(self) -> None:
        """Forget the sizes of values between the inputs and the outputs."""
        self._value_infos.clear()

    def add_constant(self, name: str, constant: Constant | np.ndarray) -> str:
        """A new initialiser; returns its name."""
        self.constants[name] = constant if isinstance(constant, Constant) else Constant.of(constant)
        self.sizes[name] = self.constants[name].shape
        return name

    def remove_unused_constants(self) -> None:
        names = self.output_names
        for name in [
            name for name in self.constants if not self._readers.get(name) and name not in names
        ]:
            del self.constants[name]

    def to_proto(
        self, refer: Callable[[onnx.TensorProto, bytes], bool] | None = None
    ) -> onnx.ModelProto:
        """The model with all values inside, but for those that `refer` lets a message refer to elsewhere."""
        model = self._without_constants()
        for name, constant in self.constants.items():
            tensor = constant.describe(name)
            values = _bytes_of(constant)
            if refer is None or not refer(tensor, values):
                tensor.raw_data = values
            model.graph.initializer.append(tensor)
        return model

    def save(self, path: Path, min_bytes: int) -> None:
        """Write the model; constants of `min_bytes` and more go into `NAME.data` beside it."""
        data = f"{path.name}.data"
        with open(path.with_name(data), "wb") as file:

            def refer(tensor: onnx.TensorProto, values: bytes) -> bool:
                if len(values) >= min_bytes:
                    file.write(bytes(-file.tell() % LINE_BYTES))
                    refer_to_file(tensor, data, file.tell(), len(values))
                    file.write(values)
                return len(values) >= min_bytes

            model = self.to_proto(refer)
        path.write_bytes(model.SerializeToString())

    def _without_constants(self) -> onnx.ModelProto:
        model = onnx.ModelProto(ir_version=self._ir_version)
        for domain, version in self.opsets.items():
            model.opset_import.add(domain=domain, version=version)
        for key, text in self.metadata.items():
            model.metadata_props.add(key=key, value=text)
        graph = model.graph
        graph.name = "graph"
        graph.node.extend(node.to_proto() for node in self.nodes)
        graph.input.extend(self.inputs)
        graph.output.extend(self.outputs)
        outputs = self.output_names
        graph.value_info.extend(
            info
            for info in self._value_infos
            if info.name in self._producers and info.name not in outputs
        )
        return model


def refer_to_file(tensor: onnx.TensorProto, location: str, offset: int, nbytes: int) -> None:
    """Let a tensor message say that its values are in a file."""
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(nbytes))):
        tensor.external_data.add(key=key, value=value)


def make_node(
    op_type: str,
    inputs: Sequence[str],
    output: str,
    attributes: dict[str, Any] | None = None,
    domain: str = "",
) -> ProtoNode:
    """A node of one output, which is called after it."""
    protos = {
        name: helper.make_attribute(name, value) for name, value in (attributes or {}).items()
    }
    return ProtoNode(op_type, tuple(inputs), [output], protos, domain, output)


def _read_node(node: onnx.NodeProto) -> ProtoNode:
    attributes = {attribute.name: attribute for attribute in node.attribute}
    return ProtoNode(
        node.op_type, tuple(node.input), list(node.output), attributes, node.domain, node.name
    )


def _read_constant(tensor: onnx.TensorProto) -> Constant:
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return Constant(None, tensor.data_type, tuple(tensor.dims))
    return Constant(numpy_helper.to_array(tensor), tensor.data_type, tuple(tensor.dims))


def _bytes_of(constant: Constant) -> bytes:
    assert constant.array is not None
    return constant.array.tobytes()
