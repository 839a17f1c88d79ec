"""Names a graph's weights as a state dict does, and writes the document that refers to them."""

from __future__ import annotations

import re
from itertools import pairwise
from keyword import iskeyword

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import from_torch_dtype
from torch import Tensor

from gemel.models.graph.document import keep_text, source_of, text_of
from gemel.models.graph.fold import Folded
from gemel.models.graph.gate import BUFFER, WEIGHTS
from gemel.models.graph.operators import OPERATORS
from gemel.models.graph.operators.recurrent import ACTIVATIONS
from gemel.models.graph.steps import RESERVED

MAX_INLINE = 64
"""Values of an integer constant that the document itself holds."""
SUFFIXES = (
    ".weight",
    ".bias",
    ".kernel",
    "_weight",
    "_bias",
    ".w_0",
    ".b_0",
    "/kernel",
    "/weight",
    ".W",
    ".B",
)
ANONYMOUS = re.compile(
    r"(onnx::|_v_|val_|folded_|const|tmp|/|[\d_.]+$|.*_output_\d+$)", re.IGNORECASE
)
"""Names that exporters make up."""
NOT_TRAINED = re.compile(r"anchor|stride|grid|mean|std|running|index|mask", re.IGNORECASE)


def write_weights(graph: ir.Graph, folded: Folded) -> dict[str, Tensor]:
    """Give every weight its key in a state dict, in the graph too, and return the state dict."""
    return _Naming(graph, folded).run()


class _Naming:
    def __init__(self, graph: ir.Graph, folded: Folded) -> None:
        self.graph = graph
        self.constants = folded.constants
        self.shapes = folded.shapes
        self.state: dict[str, Tensor] = {}
        self.values: dict[str, ir.Value] = {}
        self.paths: dict[tuple, str] = {}
        self.taken = {text_of(value) for value in [*graph.inputs, *graph.outputs]}
        self.containers: set[str] = set()
        self.inline: dict[tuple, ir.Value] = {}

    def run(self) -> dict[str, Tensor]:
        for old in list(self.graph.initializers):
            del self.graph.initializers[old]
        self.rename_values()
        for number, node in enumerate(self.graph):
            node.metadata_props.clear()
            node.doc_string = None
            self.name_node(node, number)
        for node in self.graph:
            self.name_rest(node)
        for value in [*self.values.values(), *self.inline.values()]:
            self.graph.register_initializer(value)
        return self.state

    def rename_values(self) -> None:
        """Number the values between nodes, so that no weight's key is one of them."""
        fixed = {*self.graph.inputs, *self.graph.outputs}
        for number, value in enumerate(fixed):
            keep_text(value)
            value.name = f"end/{number}"
        for number, output in enumerate(output for node in self.graph for output in node.outputs):
            output.shape = output.type = None
            output.metadata_props.clear()
            if output not in fixed:
                output.name = f"value/{number}"  # no key is like it

    def constant(self, node: ir.Node, place: int) -> Tensor | None:
        value = node.inputs[place] if place < len(node.inputs) else None
        return None if value is None else self.constants.get(value)

    def name_node(self, node: ir.Node, number: int) -> None:
        """Name the weights of a node that becomes a module."""
        kind = node.op_type
        weight = self.constant(node, 1)
        bias = self.constant(node, 2)
        has_bias = len(node.inputs) > 2 and node.inputs[2] is not None
        if (
            kind in ("Conv", "ConvTranspose")
            and weight is not None
            and (bias is not None or not has_bias)
        ):
            self.put(node, number, {"weight": 1, "bias": 2})
        elif kind == "Gemm" and weight is not None and (bias is not None or not has_bias):
            self.name_gemm(node, number, weight, bias)
        elif kind == "MatMul" and weight is not None and weight.ndim == 2:
            add = self.bias_after(node, weight.shape[1])
            self.put(node, number, {"weight": 1}, transpose=True, add=add)
        elif kind == "BatchNormalization" and all(
            self.constant(node, place) is not None for place in range(1, 5)
        ):
            path = self.put(
                node, number, {"weight": 1, "bias": 2, "running_mean": 3, "running_var": 4}
            )
            self.state[f"{path}.num_batches_tracked"] = torch.tensor(0)
        elif (
            kind in ("LayerNormalization", "GroupNormalization")
            and weight is not None
            and (has_bias == (bias is not None))
        ):
            self.put(node, number, {"weight": 1, "bias": 2})

    def name_gemm(self, node: ir.Node, number: int, weight: Tensor, bias: Tensor | None) -> None:
        """Fold alpha and beta into the weights, and name them."""
        transposed = "transB" in node.attributes and node.attributes["transB"].as_int()
        out = weight.shape[0 if transposed else 1]
        for place, name in ((1, "alpha"), (2, "beta")):
            factor = node.attributes.pop(name, None)
            value = self.constant(node, place)
            if factor is not None and factor.as_float() != 1 and value is not None:
                self.replace(node, place, value * factor.as_float())
        bias = self.constant(node, 2)
        # It is no bias of the layer: the node stays a function.
        if bias is not None and bias.numel() not in (1, out):
            return
        if bias is not None and bias.shape != (out,):
            self.replace(node, 2, bias.reshape(-1).expand(out).contiguous())
        self.put(node, number, {"weight": 1, "bias": 2}, transpose=not transposed)

    def bias_after(self, node: ir.Node, out: int) -> tuple[ir.Node, int] | None:
        """The Add of a bias after a product, and its constant's place."""
        users = list(node.outputs[0].consumers())
        if len(users) != 1 or users[0].op_type != "Add" or node.outputs[0].is_graph_output():
            return None
        place = 1 if users[0].inputs[0] is node.outputs[0] else 0
        bias = self.constant(users[0], place)
        return (users[0], place) if bias is not None and bias.shape == (out,) else None

    def put(
        self,
        node: ir.Node,
        number: int,
        keys: dict[str, int],
        transpose: bool = False,
        add: tuple[ir.Node, int] | None = None,
    ) -> str:
        """Name the constants of a node; the same constants with the same settings are one module."""
        places = {
            key: (node, place)
            for key, place in keys.items()
            if self.constant(node, place) is not None
        }
        if add is not None:
            places["bias"] = add
        values = {key: reader.inputs[place] for key, (reader, place) in places.items()}
        settings = tuple(
            sorted((name, str(value.value)) for name, value in node.attributes.items())
        )
        identity = (node.op_type, settings, *values.items())
        path = self.paths.get(identity)
        if path is None:
            path = self.paths[identity] = self.make_path(node, number, values)
        for key, value in values.items():
            tensor = self.constants[value]  # type: ignore[index]
            self.bind(*places[key], f"{path}.{key}", tensor, transpose and key == "weight")
        return path

    def bind(
        self,
        node: ir.Node,
        place: int,
        key: str,
        tensor: Tensor,
        transpose: bool = False,
        buffer: bool = False,
    ) -> None:
        """Let a node read the weight of a key."""
        # Nodes that read one weight share it.
        if key not in self.values:
            self.state[key] = tensor.t().contiguous() if transpose else tensor
            self.values[key] = _placeholder(key, tensor, buffer)
        node.replace_input_with(place, self.values[key])

    def make_path(self, node: ir.Node, number: int, values: dict[str, ir.Value | None]) -> str:
        """A module's path from the name of a weight, else of its node, else its operator and number."""
        names = [source_of(value) for value in values.values() if value is not None]
        names.insert(1, _scope(node))
        readable = next(
            (_without_suffix(name) for name in names if name and not ANONYMOUS.match(name)), None
        )
        return self.unique(_to_path(readable) if readable else f"{_snake(node.op_type)}_{number}")

    def unique(self, path: str) -> str:
        """A path that is no other's, nor above or below it."""
        path = path.replace(".", "_") if self.taken & _above(path) else path
        candidate = path
        number = 1
        while candidate in self.taken or candidate in self.containers:
            number += 1
            candidate = f"{path}_{number}"
        self.taken.add(candidate)
        self.containers |= _above(candidate)
        return candidate

    def name_rest(self, node: ir.Node) -> None:
        """Name the constants of a node that stays a function; the document holds small ones itself."""
        operator = OPERATORS[node.op_type]
        for place, value in enumerate(list(node.inputs)):
            if value is None or value not in self.constants:
                continue
            tensor = self.constants[value]
            # Shapes and axes are read before anything runs.
            if place in operator.static or (
                node.op_type == "Gather" and place == 1 and tensor.ndim == 0
            ):
                self.hold(node, place, value, tensor)
            elif tensor.numel() == 1 and self.is_scalar(node, place, tensor):
                self.hold(node, place, value, tensor.reshape(()))
            elif not tensor.is_floating_point() and tensor.numel() <= MAX_INLINE:
                # Part of a shape, which a run without weights needs.
                self.hold(node, place, value, tensor)
            else:
                name = source_of(value) or _snake(node.op_type)
                made_up = node.op_type not in ACTIVATIONS and ANONYMOUS.match(name)
                fixed = bool(made_up or NOT_TRAINED.search(name))
                # As a mask is.
                buffer = fixed or not tensor.is_floating_point() or bool(tensor.isinf().any())
                path = self.paths.get(("tensor", value))
                if path is None:
                    readable = _to_path(
                        name if not ANONYMOUS.match(name) else f"constants.{_snake(node.op_type)}"
                    )
                    path = self.paths["tensor", value] = self.unique(readable)
                self.bind(node, place, path, tensor, buffer=buffer)

    def is_scalar(self, node: ir.Node, place: int, tensor: Tensor) -> bool:
        """Whether one number says what a constant of one value does."""
        operands = [
            operand for at, operand in enumerate(node.inputs) if at != place and operand is not None
        ]
        ranks = [
            len(self.shapes[operand][0]) if operand in self.shapes else 0 for operand in operands
        ]
        simple = node.op_type in (
            "Add",
            "Sub",
            "Mul",
            "Div",
            "Pow",
            "Max",
            "Min",
            "Equal",
            "Greater",
            "Less",
            "Where",
            "GreaterOrEqual",
            "LessOrEqual",
        )
        return (
            simple
            and max(ranks, default=0) >= tensor.ndim
            and any(operand in self.shapes for operand in operands)
        )

    def hold(self, node: ir.Node, place: int, value: ir.Value, tensor: Tensor) -> None:
        """Let the document hold a constant; equal ones once."""
        key = (tensor.dtype, tuple(tensor.shape), tensor.numpy().tobytes())
        if key not in self.inline:
            name = f"constant_{len(self.inline)}"
            self.inline[key] = ir.Value(name=name, const_value=ir.tensor(tensor.numpy(), name=name))
        node.replace_input_with(place, self.inline[key])

    def replace(self, node: ir.Node, place: int, tensor: Tensor) -> None:
        old = node.inputs[place]
        assert old is not None
        value = ir.Value(name=old.name)
        value.meta["source"] = source_of(old)
        self.constants[value] = tensor
        node.replace_input_with(place, value)


def _placeholder(name: str, tensor: Tensor, buffer: bool) -> ir.Value:
    dtype = from_torch_dtype(tensor.dtype)
    doc = BUFFER if buffer else None
    external = ir.ExternalTensor(
        WEIGHTS, 0, tensor.nbytes, dtype, shape=ir.Shape(tensor.shape), name=name, doc_string=doc
    )
    return ir.Value(
        name=name, const_value=external, shape=ir.Shape(tensor.shape), type=ir.TensorType(dtype)
    )


def _scope(node: ir.Node) -> str:
    """The module that a node's name says: layer1.0.conv1 of /layer1/layer1.0/conv1/Conv."""
    scopes = text_of(node).strip("/").split("/")
    pairs = pairwise(scopes)
    return ".".join(scope for scope, inner in pairs if scope and not inner.startswith(f"{scope}."))


def _without_suffix(name: str) -> str:
    for suffix in SUFFIXES:
        if name.endswith(suffix) and len(name) > len(suffix):
            return name[: -len(suffix)]
    return name


def _to_path(name: str) -> str:
    """A name as a module's path: letters, digits and underscores between dots."""
    parts = [re.sub(r"\W", "_", part, flags=re.ASCII) for part in re.split(r"[./]+", name) if part]
    parts = [f"{part}_" if part in RESERVED or iskeyword(part) else part for part in parts]
    return ".".join(parts)[:200] or "weights"


def _above(path: str) -> set[str]:
    """The paths above one: a and a.b of a.b.c."""
    parts = path.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts))}


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
