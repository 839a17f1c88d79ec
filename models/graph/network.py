"""Builds the torch module of a document: convolutions, linear layers and norms as modules, the rest as functions."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from gemel.models.errors import InputError, message_of
from gemel.models.graph.document import parse_model, text_of
from gemel.models.graph.document_bounds import HINT
from gemel.models.graph.gate import BUFFER, WHERE
from gemel.models.graph.node_calls import check_operator, prepare_call
from gemel.models.graph.operators import OPERATORS
from gemel.models.graph.operators.layer_functions import flat_pads, window_pads
from gemel.models.graph.operators.shapes import dtype_of
from gemel.models.graph.steps import NetworkStep, Result, StepKind, StepNetwork
from gemel.models.graph.torch_values import attributes_of, to_torch
from gemel.models.graph.unfold import ChannelAffine, is_affine

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
CONV_TRANSPOSE = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def build_graph(document: bytes, device: str | torch.device = "cpu") -> StepNetwork:
    """The module of a graph's document, in eval mode, its weights without values.

    It takes the picture (N, 3, H, W) and returns a tuple of the outputs; `load_state_dict(graph.state)` fits it.
    Raises InputError for a document that is damaged.
    """
    model = parse_model(document, WHERE)
    try:
        return _Builder(model.graph, torch.device(device)).build()
    except InputError:
        raise
    except Exception as error:  # a malformed document fails anywhere, with any kind
        raise InputError(WHERE, f"is malformed: {message_of(error)}", HINT) from error


class _Builder:
    def __init__(self, graph: ir.Graph, device: torch.device) -> None:
        self.graph = graph
        self.device = device
        (picture,) = graph.inputs
        self.root = StepNetwork(one_by_one=picture.shape is not None and picture.shape[0] == 1)
        self.steps: list[NetworkStep] = []
        self.opset = graph.opset_imports.get("", graph.opset_imports.get("ai.onnx", 0))
        self.results: dict[ir.Value, Result] = {picture: Result(0)}
        self.weights: dict[ir.Value, ir.ExternalTensor] = {}
        self.constants: dict[ir.Value, Tensor] = {}
        self.fused: set[ir.Node] = set()
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                self.weights[value] = tensor
            elif tensor is not None:
                self.constants[value] = to_torch(tensor.numpy())

    def build(self) -> StepNetwork:
        for node in self.graph:
            if node not in self.fused:
                check_operator(node, WHERE)
                self.add(node)
        ends = [self.read(value).number for value in self.graph.outputs]
        self.root.set_steps(self.steps, ends)
        return self.root.eval()

    def add_step(self, kind: StepKind, name: str, *arguments: Any, **options: Any) -> Result:
        """Run one step more; what it gives."""
        self.steps.append(NetworkStep(kind, name, arguments, options))
        return Result(len(self.steps))

    def read(self, value: ir.Value) -> Result:
        """The result that a value is, or that of the weight."""
        if value not in self.results:
            if value not in self.weights and value not in self.constants:
                raise InputError(WHERE, f"'{text_of(value)}' is made by no node", HINT)
            self.results[value] = self.add_step(StepKind.TENSOR, self.put_tensor(value))
        return self.results[value]

    def put_tensor(self, value: ir.Value) -> str:
        """Put a weight that is no module's into the module at its path."""
        path = value.name or ""
        owner, _, name = path.rpartition(".")
        holder = self.holder(owner)
        if value in self.constants:
            holder.register_buffer(name, self.constants[value], persistent=False)
            return path
        external = self.weights[value]
        dtype = dtype_of(int(external.dtype))
        tensor = torch.empty(external.shape.numpy(), dtype=dtype, device=self.device)
        if external.doc_string == BUFFER or not dtype.is_floating_point:
            holder.register_buffer(name, tensor)
        else:
            holder.register_parameter(name, nn.Parameter(tensor))
        return path

    def holder(self, path: str) -> nn.Module:
        module = self.root
        for part in path.split(".") if path else []:
            child = module._modules.get(part)
            if child is None:
                child = nn.Module()
                module.add_module(part, child)
            module = child
        return module

    def add(self, node: ir.Node) -> None:
        call = self.add_module(node)
        if call is None:
            operator = OPERATORS[node.op_type]
            inputs = [
                self.argument(value, place in operator.static)
                for place, value in enumerate(node.inputs)
            ]
            if node.op_type == "Identity" and node.inputs[0] is not None:
                # An output that is one number is a tensor still.
                inputs = [self.read(node.inputs[0])]
            arguments, attributes = prepare_call(node, inputs, self.opset)
            call = self.add_step(StepKind.OPERATOR, node.op_type, *arguments, **attributes)
        if isinstance(call, tuple):
            call, output = call
            self.results[output] = call
        elif len(node.outputs) > 1 or node.op_type in ("Split", "TopK"):
            for place, output in enumerate(node.outputs):
                self.results[output] = self.add_step(StepKind.FUNCTION, "part", call, place)
        else:
            self.results[node.outputs[0]] = call

    def argument(self, value: ir.Value | None, static: bool) -> Any:
        if value is None:
            return None
        constant = self.constants.get(value)
        if constant is not None and (static or constant.ndim == 0):
            return constant.tolist()
        return self.read(value)

    # Modules

    def add_module(self, node: ir.Node) -> Result | tuple[Result, ir.Value] | None:
        """The call of a node's module; None where it stays a function."""
        weight = (
            self.weights.get(node.inputs[1])
            if len(node.inputs) > 1 and node.inputs[1] is not None
            else None
        )
        path, _, last = (weight.name or "").rpartition(".") if weight is not None else ("", "", "")
        if weight is None or last != "weight" or not path:
            return None
        names = [value.name if value is not None else None for value in node.inputs]
        makers = {
            "Conv": self.make_conv,
            "ConvTranspose": self.make_conv,
            "Gemm": self.make_linear,
            "MatMul": self.make_linear,
            "BatchNormalization": self.make_batch_norm,
            "LayerNormalization": self.make_layer_norm,
            "GroupNormalization": self.make_group_norm,
        }
        if node.op_type not in makers or (
            len(names) > 2 and names[2] not in (None, f"{path}.bias")
        ):
            return None
        shape = [int(size) for size in weight.shape.numpy()]
        return makers[node.op_type](node, path, shape)

    def call(
        self, path: str, module: nn.Module | None, node: ir.Node, x: Result | None = None
    ) -> Result:
        """Call the module at a path, put there unless it is already."""
        owner, _, name = path.rpartition(".")
        holder = self.holder(owner)
        if name not in holder._modules:
            holder.add_module(name, module)
        assert node.inputs[0] is not None
        return self.add_step(StepKind.MODULE, path, self.read(node.inputs[0]) if x is None else x)

    def make_conv(self, node: ir.Node, path: str, shape: list[int]) -> Result | None:
        options = attributes_of(node)
        rank = len(shape) - 2
        stride = options.get("strides") or [1] * rank
        dilation = options.get("dilations") or [1] * rank
        auto = options.get("auto_pad", "NOTSET")
        group = options.get("group", 1)
        # torch's modules pad by fixed sizes, and take no other shape of the output.
        if rank not in CONV or auto.startswith("SAME") or options.get("output_shape"):
            return None
        sides = window_pads([0] * rank, shape[2:], stride, dilation, auto, options.get("pads"))
        even = all(before == after for before, after in sides)
        padding = tuple(before for before, _ in sides) if even else (0,) * rank
        has_bias = len(node.inputs) > 2 and node.inputs[2] is not None
        settings: dict[str, Any] = {
            "kernel_size": tuple(shape[2:]),
            "stride": tuple(stride),
            "padding": padding,
            "dilation": tuple(dilation),
            "groups": group,
            "bias": has_bias,
            "device": self.device,
            "dtype": torch.float32,
        }
        assert node.inputs[0] is not None
        if node.op_type == "ConvTranspose":
            extra = options.get("output_padding") or [0] * rank
            if not even or any(
                size >= max(pair) for size, pair in zip(extra, zip(stride, dilation))
            ):
                return None
            kind = CONV_TRANSPOSE[rank]
            return self.call(
                path,
                kind(shape[0], shape[1] * group, output_padding=tuple(extra), **settings),
                node,
            )
        x = self.read(node.inputs[0])
        # torch's modules pad both sides alike.
        if not even:
            x = self.add_step(StepKind.FUNCTION, "pad", x, tuple(flat_pads(sides)))
        return self.call(path, CONV[rank](shape[1] * group, shape[0], **settings), node, x)

    def make_linear(
        self, node: ir.Node, path: str, shape: list[int]
    ) -> Result | tuple[Result, ir.Value] | None:
        options = attributes_of(node)
        assert node.inputs[0] is not None
        x = self.read(node.inputs[0])
        inner, outer = shape if not options.get("transB") else shape[::-1]
        if options.get("transA"):
            x = self.add_step(StepKind.FUNCTION, "transpose", x)
        add = self.bias_after(node, path) if node.op_type == "MatMul" else None
        has_bias = add is not None or (len(node.inputs) > 2 and node.inputs[2] is not None)
        module = nn.Linear(inner, outer, bias=has_bias, device=self.device, dtype=torch.float32)
        call = self.call(path, module, node, x)
        # No Add behind the product holds a bias.
        if add is None:
            return call
        self.fused.add(add)
        return call, add.outputs[0]

    def bias_after(self, node: ir.Node, path: str) -> ir.Node | None:
        users = list(node.outputs[0].consumers())
        if len(users) != 1 or users[0].op_type != "Add":
            return None
        names = [value.name for value in users[0].inputs if value is not None]
        return users[0] if f"{path}.bias" in names else None

    def make_batch_norm(self, node: ir.Node, path: str, shape: list[int]) -> Result:
        if is_affine(node):
            return self.call(path, ChannelAffine(shape[0], self.device), node)
        options = attributes_of(node)
        momentum = 1 - options.get("momentum", 0.9)
        eps = options.get("epsilon", 1e-5)
        return self.call(
            path,
            GraphBatchNorm(shape[0], eps, momentum, device=self.device, dtype=torch.float32),
            node,
        )

    def make_layer_norm(self, node: ir.Node, path: str, shape: list[int]) -> Result | None:
        options = attributes_of(node)
        axis = options.get("axis", -1)
        # torch's norm takes the last axes alone.
        if axis >= 0 or -axis != len(shape):
            return None
        has_bias = len(node.inputs) > 2 and node.inputs[2] is not None
        eps = options.get("epsilon", 1e-5)
        module = nn.LayerNorm(shape, eps, bias=has_bias, device=self.device, dtype=torch.float32)
        return self.call(path, module, node)

    def make_group_norm(self, node: ir.Node, path: str, shape: list[int]) -> Result | None:
        # Scale and bias are by group before, and torch's module has them by channel.
        if self.opset < 21:
            return None
        options = attributes_of(node)
        eps = options.get("epsilon", 1e-5)
        return self.call(
            path, nn.GroupNorm(options["num_groups"], shape[0], eps, device=self.device), node
        )


class GraphBatchNorm(nn.BatchNorm2d):
    """A BatchNorm of any number of axes."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass
