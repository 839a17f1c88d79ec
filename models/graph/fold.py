"""Folds what does not depend on the picture, finds every shape, and makes the batch free.

Each node is computed on the meta device at two batch sizes; one without a tensor of the picture is computed for real.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from gemel.models.errors import InputError
from gemel.models.graph.document import (
    MAX_TENSOR_BYTES,
    describe_node,
    keep_text,
    pass_name,
    source_of,
    text_of,
)
from gemel.models.graph.document_bounds import HINT, MAX_NODES
from gemel.models.graph.operators import OPERATORS
from gemel.models.graph.operators.operator_registry import integers, number
from gemel.models.graph.operators.recurrent import ACTIVATIONS, FIRST_STATES, LENGTHS
from gemel.models.graph.operators.shapes import dtype_of
from gemel.models.graph.torch_values import attributes_of, to_torch
from gemel.models.graph.work import (
    CALL,
    MAX_FRAME_OPERATIONS,
    TOUCH,
    TooMuchWork,
    WorkBudget,
    count_operations,
)

MAX_KEY_VALUES = 64
"""Of a static input by which the sizes of a result are remembered."""
NEVER_FOLDED = ("RoiAlign",)
"""Operators whose work the values of their inputs decide."""
CONTROL_FLOW = ("Loop", "Scan", "SequenceMap", "If")
COUNTED = ("NonZero", "Unique", "Compress")
"""Operators whose results have as many values as the picture decides."""
COUNTED_HINT = (
    "give its PyTorch weights to the zoo's model of that name (fasterrcnn_..., keypointrcnn_...) or its code as "
    "package.module:factory"
)
QUANTISED = (
    "QuantizeLinear",
    "DynamicQuantizeLinear",
    "QLinearConv",
    "QLinearMatMul",
    "ConvInteger",
    "MatMulInteger",
)
ALONG_AXIS = {
    "Softmax", "LogSoftmax", "ArgMax", "ArgMin", "TopK", "CumSum", "Gather", "GatherElements", "Concat",
    "Split", "LpNormalization", "ScatterElements",
}  # fmt: skip
"""Operators that mix what is along their axis."""
Pair = tuple[Any, Any]


class BatchError(Exception):
    """Why a graph that fixes its batch cannot take another."""


@dataclass
class Folded:
    """A graph after folding: the constants that are left, and what each value is at the two batch sizes."""

    constants: dict[ir.Value, Tensor]
    shapes: dict[ir.Value, tuple[list[int], list[int]]]
    dtypes: dict[ir.Value, torch.dtype]
    batch: int
    free: bool
    led: tuple[str, ...] = ()
    """Outputs that have an axis more than the file's: the batch, which came first."""


@dataclass(frozen=True)
class _NodeResult:
    """What a node gives on the meta device, and the operations that it is."""

    results: tuple[Tensor, ...]
    operations: int


@dataclass
class FoldLimits:
    """What all ways to fold one file may do together, and the sizes of results that are known already."""

    budget: WorkBudget
    sizes: dict[Any, _NodeResult]


def fold_graph(
    graph: ir.Graph,
    constants: dict[ir.Value, Tensor],
    input_shape: list[int],
    free: str,
    limits: FoldLimits,
) -> Folded:
    """Fold a graph in place for an input's shape.

    `free` says how its batch varies: "dynamic" as its own shape arithmetic says, "fixed" against the sizes it was
    exported with, "no" not at all. Raises BatchError where it cannot, InputError for a graph that cannot be taken.
    """
    return _Folding(graph, dict(constants), input_shape, free, limits).run()


class _Folding:
    def __init__(
        self,
        graph: ir.Graph,
        constants: dict,
        input_shape: list[int],
        free: str,
        limits: FoldLimits,
    ) -> None:
        self.graph = graph
        self.constants = constants
        self.free = free
        self.limits = limits
        self.where = limits.budget.where
        self.batch = input_shape[0]
        self.opset = graph.opset_imports.get("", graph.opset_imports.get("ai.onnx", 0))
        factor = 1 if free == "no" else 2
        (self.input,) = [value for value in graph.inputs if value not in constants]
        dtype = to_torch_type(self.input.dtype)
        first, second = (
            torch.empty([n, *input_shape[1:]], dtype=dtype, device="meta")
            for n in (self.batch, self.batch * factor)
        )
        self.tensors: dict[ir.Value, Pair] = {self.input: (first, second)}
        self.spliced: dict[ir.Value, ir.Value] = {}
        """What stands in place of the outputs of an If whose branch was taken."""
        self.outer: dict[ir.Value, int] = {}
        """How often the batch is repeated within its axis by what lies outside it: L of an axis of L * batch."""
        self.folded_bytes = self.frame_operations = 0
        self.steps = 0
        self.led: list[str] = []

    def run(self) -> Folded:
        for node in list(self.graph):
            self.visit(node)
        if self.free == "fixed":
            for place, output in enumerate(list(self.graph.outputs)):
                self.lead_with_batch(place, output)
        self.remove_folded()
        shapes = {
            value: tuple(list(tensor.shape) for tensor in pair)
            for value, pair in self.tensors.items()
        }
        dtypes = {value: pair[0].dtype for value, pair in self.tensors.items()}
        return Folded(
            self.constants, shapes, dtypes, self.batch, self.free != "no", tuple(self.led)
        )  # type: ignore[arg-type]

    def remove_folded(self) -> None:
        """Remove the nodes whose results are constants; an output that is one is copied from it."""
        for output in self.graph.outputs:
            if self.pair(output) is None:
                raise InputError(
                    self.where, f"the output '{text_of(output)}' is made by no node", HINT
                )
        outputs = set(self.graph.outputs)
        for node in list(self.graph):
            if not all(output in self.constants for output in node.outputs):
                continue
            if not outputs.intersection(node.outputs):
                self.graph.remove(node)
                continue
            (output,) = node.outputs
            value = self.constants.pop(output)
            self.tensors[output] = (value, value)
            node.op_type = "Identity"
            node.domain = ""
            node.attributes.clear()
            node.resize_inputs(1)
            node.replace_input_with(0, self.new_constant(value))

    def pair(self, value: ir.Value | None) -> Pair | None:
        """A value at both batch sizes: on the CPU where it is known, else on the meta device."""
        if value is None:
            return None
        constant = self.constants.get(value)
        return (constant, constant) if constant is not None else self.tensors.get(value)

    def visit(self, node: ir.Node) -> None:
        self.steps += 1
        if self.steps > MAX_NODES:
            raise InputError(self.where, f"has more than {MAX_NODES} nodes", HINT)
        if node.op_type == "Constant":
            return self.set_constant(node, [_constant_value(node)])
        if node.op_type == "If" and self.splice_branch(node):
            return None
        check_operator(node, self.where)
        if node.inputs and node.inputs[0] is not None and self.does_nothing(node, node.inputs[0]):
            return self.forward(node, node.inputs[0])
        if node.op_type in ACTIVATIONS:
            self.drop_defaults(node)
        inputs = [self.pair(value) for value in node.inputs]
        for value, pair in zip(node.inputs, inputs):
            if value is not None and pair is None:
                raise InputError(
                    self.where,
                    f"{describe_node(node)} reads '{text_of(value, self.graph)}', which nothing makes",
                    HINT,
                )
        constant = [
            pair is None or all(tensor.device.type == "cpu" for tensor in pair) for pair in inputs
        ]
        same = all(pair is None or pair[0] is pair[1] for pair in inputs)
        if node.op_type in ("Shape", "Size"):
            first, second = (self.compute(node, [tensor]) for tensor in inputs[0] or ())
            return self.set_known(node, first, second)
        if all(constant):
            self.check_folded(node, inputs)
            first = self.compute(node, [pair and pair[0] for pair in inputs])
            second = first if same else self.compute(node, [pair and pair[1] for pair in inputs])
            return self.set_known(node, first, second)
        if node.op_type in COUNTED:
            problem = f"{describe_node(node)} counts what the picture shows, as the regions of a two-stage detector"
            raise InputError(self.where, problem, COUNTED_HINT)
        if node.op_type == "Gather" and self.unstride(node):
            return None
        if self.free == "fixed":
            inputs = self.free_batch(node, inputs)
        first, second = (self.find_sizes(node, inputs, run) for run in (0, 1))
        self.count_frame(node, first.operations)
        results = first.results, second.results
        if len(node.outputs) > len(results[0]):
            problem = f"{describe_node(node)} has {len(node.outputs)} outputs, of which {len(results[0])} are computed"
            raise InputError(self.where, problem, "export the model without the others")
        if self.free == "dynamic":
            self.settle(node, inputs, results)
        self.check_batch(node, inputs, results)
        outer = next((self.outer[value] for value in node.inputs if value in self.outer), 1)
        for output, first, second in zip(node.outputs, *results):
            self.tensors[output] = (first, second)
            if outer != 1:
                self.outer.setdefault(output, outer)
        return None

    def does_nothing(self, node: ir.Node, value: ir.Value) -> bool:
        """Whether a node gives what it reads; a cast to half precision becomes one to float32."""
        pair = self.pair(value)
        if node.op_type != "Cast" or pair is None:
            return node.op_type in ("Identity", "Dropout")
        target = dtype_of(node.attributes["to"].as_int())
        if target == torch.float32:
            node.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.FLOAT))
        return pair[0].dtype == target

    def drop_defaults(self, node: ir.Node) -> None:
        """Leave out the first states of a recurrent layer that are zero, and lengths that are the sequence's."""
        pair = self.pair(node.inputs[0])
        length = (
            pair[0].shape[node.attributes["layout"].as_int() if "layout" in node.attributes else 0]
            if pair
            else 0
        )
        for place, usual in [
            (LENGTHS, length),
            *((place, 0) for place in FIRST_STATES[node.op_type]),
        ]:
            setting = self.pair(node.inputs[place]) if place < len(node.inputs) else None
            if setting is not None and all(
                tensor.device.type == "cpu" and bool((tensor == usual).all()) for tensor in setting
            ):
                node.replace_input_with(place, None)

    # Computing

    def meta(self, node: ir.Node, inputs: list[Pair | None], run: int) -> list[Tensor | None]:
        static = OPERATORS[node.op_type].static
        tensors = []
        for place, pair in enumerate(inputs):
            tensor = None if pair is None else pair[run]
            if tensor is not None and place not in static:
                tensor = (
                    tensor
                    if tensor.device.type == "meta"
                    else torch.empty_like(tensor, device="meta")
                )
            elif tensor is not None and tensor.device.type == "meta":
                raise InputError(
                    self.where,
                    f"{describe_node(node)}: a shape or bound depends on what the picture shows",
                    HINT,
                )
            tensors.append(tensor)
        return tensors

    def compute(self, node: ir.Node, inputs: list[Tensor | None]) -> tuple[Tensor, ...]:
        try:
            result = apply(node, inputs, self.opset)
        except InputError:
            raise
        except Exception as error:  # torch raises many kinds for sizes that do not fit
            text = str(error).split("\n", 1)[0]
            raise InputError(
                self.where, f"{describe_node(node)} cannot be computed: {text}", HINT
            ) from error
        total = sum(tensor.numel() * tensor.element_size() for tensor in result)
        if total > MAX_TENSOR_BYTES:
            raise InputError(
                self.where, f"{describe_node(node)} makes a tensor of {total} bytes", HINT
            )
        return result

    def find_sizes(self, node: ir.Node, inputs: list[Pair | None], run: int) -> _NodeResult:
        """What a node gives on the meta device; equal nodes are computed once."""
        arguments = self.meta(node, inputs, run)
        key = _size_key(node, arguments)
        result = None if key is None else self.limits.sizes.get(key)
        if result is None:
            self.limits.budget.spend(CALL, describe_node(node))
            results = self.compute(node, arguments)
            sizes = [None if tensor is None else tensor.shape for tensor in arguments]
            is_float = all(tensor.is_floating_point() for tensor in arguments if tensor is not None)
            shapes = [tensor.shape for tensor in results]
            operations = count_operations(
                node.op_type, sizes, shapes, attributes_of(node), is_float
            )
            result = _NodeResult(results, operations)
            if key is not None:
                self.limits.sizes[key] = result
        return result

    def check_folded(self, node: ir.Node, inputs: list[Pair | None]) -> None:
        """Refuse constants that would take long or fill the memory, before they are computed."""
        description = describe_node(node)
        budget = self.limits.budget
        if node.op_type in NEVER_FOLDED:
            raise InputError(self.where, f"{description} reads constants alone", HINT)
        count = _count_new(node, [pair[1] for pair in inputs if pair is not None])
        if count is None:
            result = self.find_sizes(node, inputs, 1)
            nbytes = sum(tensor.numel() * tensor.element_size() for tensor in result.results)
            operations = result.operations
        else:
            nbytes = 8 * count
            operations = TOUCH * count
        self.folded_bytes += nbytes
        budget.check_bytes(self.folded_bytes, description)
        budget.spend(operations, description)

    def count_frame(self, node: ir.Node, operations: int) -> None:
        """Refuse a network that no machine computes for one frame."""
        self.frame_operations += operations // self.batch
        if self.frame_operations > MAX_FRAME_OPERATIONS:
            problem = f"{describe_node(node)}: one frame would take {self.frame_operations:.0e} operations"
            raise TooMuchWork(self.where, problem, HINT)

    def set_known(
        self, node: ir.Node, first: tuple[Tensor, ...], second: tuple[Tensor, ...]
    ) -> None:
        if first is second or all(
            a.shape == b.shape and torch.equal(a, b) for a, b in zip(first, second)
        ):
            return self.set_constant(node, first)
        for output, a, b in zip(node.outputs, first, second):
            self.tensors[output] = (a, b)
        return None

    def set_constant(self, node: ir.Node, results: Any) -> None:
        for output, tensor in zip(node.outputs, results):
            source = next(
                (value for value in node.inputs if value is not None and value in self.constants),
                None,
            )
            if source is not None and source.name and tensor.is_floating_point():
                output.meta.setdefault("source", source_of(source))
            self.constants[output] = tensor
            keep_text(output)
        return None

    def forward(self, node: ir.Node, value: ir.Value) -> None:
        """Let a node's readers read `value`; an output of the graph keeps its node."""
        output = node.outputs[0]
        constant = self.constants.get(value)
        if constant is not None:
            return self.set_constant(node, [constant])
        self.tensors[output] = self.tensors[value]
        if not output.is_graph_output():
            output.replace_all_uses_with(value)
        return None

    def splice_branch(self, node: ir.Node) -> bool:
        """Put the branch of an If in its place where its condition is known."""
        condition = (
            self.constants.get(node.inputs[0])
            if node.inputs and node.inputs[0] is not None
            else None
        )
        if condition is None:
            return False
        branch: ir.Graph = node.attributes[
            "then_branch" if bool(condition) else "else_branch"
        ].value
        for value in branch.initializers.values():
            self.constants[value] = read_initializer(value, self.where)
        inner = list(branch)
        outputs = list(branch.outputs)
        branch.outputs.clear()
        branch.remove(inner)
        self.graph.insert_before(node, inner)
        for member in inner:
            self.visit(member)
        for old, new in zip(node.outputs, outputs):
            new = self.spliced.get(new, new)
            if old.is_graph_output():
                bridge = ir.node("Identity", [new], outputs=None)
                self.graph.insert_before(node, bridge)
                pass_name(old, bridge.outputs[0], "_before")
                places = [place for place, output in enumerate(self.graph.outputs) if output is old]
                for place in places:
                    self.graph.outputs[place] = bridge.outputs[0]
                self.visit(bridge)
                new = bridge.outputs[0]
            old.replace_all_uses_with(new)
            self.spliced[old] = new
        return True

    # The batch

    def axis_of(self, pair: Pair | None) -> int | None:
        """The axis of a tensor along which the batch is."""
        if pair is None or pair[0].ndim != pair[1].ndim:
            return None
        return next(
            (axis for axis, (a, b) in enumerate(zip(pair[0].shape, pair[1].shape)) if a != b), None
        )

    def free_batch(self, node: ir.Node, inputs: list[Pair | None]) -> list[Pair | None]:
        """Rewrite a node whose constants fix the batch; what its inputs are from then on."""
        axis = self.axis_of(inputs[0])
        if node.op_type in ("Reshape", "Squeeze", "Flatten") and axis is not None:
            assert inputs[0] is not None and node.inputs[0] is not None
            source = list(inputs[0][0].shape)
            (result,) = self.find_sizes(node, inputs, 0).results
            before = math.prod(source[:axis]) * self.outer.get(node.inputs[0], 1)
            product = any(
                user.op_type in ("Gemm", "MatMul") and index == 0
                for user, index in node.outputs[0].uses()
            )
            place, outer = _batch_place(before, axis, list(result.shape), self.batch, product) or (
                None,
                1,
            )
            if place is None:
                raise BatchError(f"{describe_node(node)} splits the batch")
            self.outer[node.outputs[0]] = outer
            return self.replace_reshape(
                node,
                inputs,
                [-1 if axis == place else size for axis, size in enumerate(result.shape)],
            )
        if node.op_type in ("Concat", "GatherElements", "ScatterElements"):
            axes = {self.axis_of(pair) for pair in inputs} - {None}
            if len(axes) == 1:
                return self.expand_batch(node, inputs, axes.pop())  # type: ignore[arg-type]
        return inputs

    def unstride(self, node: ir.Node) -> bool:
        """Make a Gather that only permutes a flat tensor, as torch exports as_strided, a Reshape and a Transpose."""
        values, places = node.inputs[0], self.constants.get(node.inputs[1])  # type: ignore[arg-type]
        source = values.producer() if values is not None else None
        if places is None or places.ndim < 2 or source is None or source.op_type != "Reshape":
            return False
        if (
            len(self.tensors[values][0].shape) != 1
            or places.numel() != self.tensors[values][0].numel()
        ):  # type: ignore[index]
            return False
        strides = [
            int(places.select(axis, 1).flatten()[0]) if size > 1 else 0
            for axis, size in enumerate(places.shape)
        ]
        order = sorted(
            range(places.ndim),
            key=lambda axis: (places.shape[axis] > 1 or axis > 0, -strides[axis], axis),
        )
        sizes = [places.shape[axis] for axis in order]
        back = [order.index(axis) for axis in range(places.ndim)]
        if not torch.equal(torch.arange(places.numel()).reshape(sizes).permute(back), places):
            return False
        split = ir.node("Reshape", [source.inputs[0], self.new_constant(torch.tensor(sizes))])
        self.graph.insert_before(node, split)
        self.visit(split)
        node.op_type = "Transpose"
        node.attributes.clear()
        node.attributes["perm"] = ir.AttrInt64s("perm", back)
        node.resize_inputs(1)
        node.replace_input_with(0, split.outputs[0])
        self.visit(node)
        return True

    def lead_with_batch(self, place: int, output: ir.Value) -> None:
        """Let an output whose batch is inside an axis (a file that squeezed it) have the batch as its first axis."""
        pair = self.pair(output)
        axis = self.axis_of(pair)
        if pair is None or axis is None or (axis == 0 and pair[0].shape[0] == self.batch):
            return
        sizes = list(pair[0].shape)
        outer = self.outer.get(output, 1)
        sizes[axis : axis + 1] = [outer, -1, sizes[axis] // self.batch // outer]
        split = ir.node("Reshape", [output, self.new_constant(torch.tensor(sizes))])
        lead = ir.node(
            "Transpose",
            [split.outputs[0]],
            {"perm": [axis + 1, *(other for other in range(len(sizes)) if other != axis + 1)]},
        )
        joined = ir.node(
            "Reshape", [lead.outputs[0], self.new_constant(torch.tensor([-1, *pair[0].shape]))]
        )
        self.outer.pop(output, None)
        pass_name(output, joined.outputs[0], "_inside")
        self.graph.outputs[place] = joined.outputs[0]
        self.led.append(text_of(joined.outputs[0]))
        self.graph.extend([split, lead, joined])
        mode = self.free
        self.free = "expanding"
        for node in (split, lead, joined):
            self.visit(node)
        self.free = mode

    def replace_reshape(
        self, node: ir.Node, inputs: list[Pair | None], sizes: list[int]
    ) -> list[Pair | None]:
        """Make a node a Reshape to constant sizes."""
        target = self.new_constant(torch.tensor(sizes, dtype=torch.int64))
        if node.op_type == "Reshape":
            node.replace_input_with(1, target)
            node.attributes.pop("allowzero", None)
        else:
            node.op_type = "Reshape"
            node.attributes.clear()
            node.resize_inputs(2)
            node.replace_input_with(1, target)
        return [inputs[0], self.pair(target)]

    def new_constant(self, tensor: Tensor) -> ir.Value:
        value = ir.Value(name=f"folded_{len(self.constants)}")
        self.constants[value] = tensor
        return value

    def expand_batch(
        self, node: ir.Node, inputs: list[Pair | None], axis: int
    ) -> list[Pair | None]:
        """Repeat inputs without a batch (class tokens, anchors) along the others' batch before they are joined."""
        expanded = list(inputs)
        reader = next(
            value for value, pair in zip(node.inputs, inputs) if self.axis_of(pair) is not None
        )
        joined = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
        for place, (value, pair) in enumerate(zip(list(node.inputs), inputs)):
            if pair is None or value is None or self.axis_of(pair) is not None:
                continue
            if joined % pair[0].ndim == axis or pair[0].shape[axis] != self.batch:
                raise BatchError(f"{describe_node(node)} joins tensors along the batch")
            ones = pair[0].ndim
            size = ir.node("Shape", [reader])
            index = self.new_constant(torch.tensor([axis]))
            length = ir.node("Gather", [size.outputs[0], index], {"axis": 0})
            parts: list[ir.Value] = (
                [self.new_constant(torch.ones(axis, dtype=torch.int64))] if axis else []
            )
            parts.append(length.outputs[0])
            if axis + 1 < ones:
                parts.append(self.new_constant(torch.ones(ones - axis - 1, dtype=torch.int64)))
            target = ir.node("Concat", parts, {"axis": 0})
            wide = ir.node("Expand", [value, target.outputs[0]])
            new = [size, length, target, wide]
            self.graph.insert_before(node, new)
            mode = self.free
            self.free = "expanding"
            for member in new:
                self.visit(member)
            self.free = mode
            node.replace_input_with(place, wide.outputs[0])
            expanded[place] = self.tensors[wide.outputs[0]]
        return expanded

    def settle(self, node: ir.Node, inputs: list[Pair | None], results: Any) -> None:
        """Replace sizes that depend on the batch by constant ones where -1 or 1 says the same."""
        if (
            node.op_type not in ("Reshape", "Expand")
            or inputs[1] is None
            or inputs[1][0] is inputs[1][1]
        ):
            return
        (first,), (second,) = results
        places = [place for place, (a, b) in enumerate(zip(first.shape, second.shape)) if a != b]
        if first.ndim != second.ndim or len(places) != 1 or 0 in first.shape:
            return
        if node.op_type == "Reshape":
            self.replace_reshape(
                node,
                inputs,
                [-1 if axis in places else size for axis, size in enumerate(first.shape)],
            )
        elif (
            self.axis_of(inputs[0]) is not None
            and inputs[0] is not None
            and inputs[0][0].ndim == first.ndim
        ):
            sizes = [1 if axis in places else size for axis, size in enumerate(first.shape)]
            node.replace_input_with(1, self.new_constant(torch.tensor(sizes, dtype=torch.int64)))

    def check_batch(self, node: ir.Node, inputs: list[Pair | None], results: Any) -> None:
        """Refuse to free a batch that this node would mix."""
        if self.free not in ("fixed", "dynamic"):
            return
        axes = [self.axis_of(pair) for pair in inputs]
        if all(axis is None for axis in axes):
            return
        for a, b in zip(*results):
            places = [place for place, (x, y) in enumerate(zip(a.shape, b.shape)) if x != y]
            if a.ndim != b.ndim or len(places) != 1 or b.shape[places[0]] != 2 * a.shape[places[0]]:
                raise BatchError(f"{describe_node(node)} loses the batch")
        if self.free == "fixed" and _mixes(node, inputs, axes):
            raise BatchError(f"{describe_node(node)} mixes the batch")


def _size_key(node: ir.Node, arguments: list[Tensor | None]) -> Any:
    """Equal for nodes whose results have the same sizes; None for one that is not compared."""
    key: list[Any] = [node.op_type, node.domain, len(node.outputs)]
    for name, attribute in node.attributes.items():
        if attribute.type in (ir.AttributeType.TENSOR, ir.AttributeType.GRAPH):
            return None
        value = attribute.value
        key += [name, tuple(value) if isinstance(value, Sequence) else value]
    for tensor in arguments:
        if tensor is None:
            key.append(None)
        elif tensor.is_meta:
            key += [tensor.shape, tensor.dtype]
        elif tensor.numel() <= MAX_KEY_VALUES:
            key += [tensor.shape, tensor.dtype, tuple(tensor.flatten().tolist())]
        else:
            return None
    return tuple(key)


def _count_new(node: ir.Node, inputs: list[Tensor]) -> int | None:
    """The values that a node makes from numbers alone, or at most; None for one whose sizes are found otherwise."""
    if node.op_type == "ConstantOfShape" and inputs:
        return max(0, math.prod(integers(inputs[0])))
    if node.op_type == "Range" and len(inputs) == 3:
        start, limit, delta = (number(bound) for bound in inputs)
        return max(0, math.ceil(min((limit - start) / delta, 2.0**62))) if delta else 0
    if node.op_type == "NonZero" and inputs:
        return inputs[0].numel() * max(1, inputs[0].ndim)
    return None


def _mixes(node: ir.Node, inputs: list[Pair | None], axes: list[int | None]) -> bool:
    first = next(place for place, axis in enumerate(axes) if axis is not None)
    axis = axes[first]
    pair = inputs[first]
    assert pair is not None and axis is not None
    rank = pair[0].ndim
    if node.op_type in ALONG_AXIS:
        default = {"Softmax": -1, "LogSoftmax": -1, "TopK": -1, "LpNormalization": -1}.get(
            node.op_type, 0
        )
        attribute = node.attributes.get("axis")
        return (default if attribute is None else attribute.as_int()) % rank == axis
    if node.op_type == "Slice" and len(inputs) > 3 and inputs[3] is not None:
        return axis in [int(sliced) % rank for sliced in inputs[3][0].reshape(-1).tolist()]
    if node.op_type in ("LayerNormalization", "RMSNormalization"):
        attribute = node.attributes.get("axis")
        return axis >= (-1 if attribute is None else attribute.as_int()) % rank
    if node.op_type in ACTIVATIONS:
        return axis != (
            0 if "layout" in node.attributes and node.attributes["layout"].as_int() else 1
        )
    return node.op_type in ("GatherND", "ScatterND", "NonZero", "OneHot")


def _batch_place(
    before: int, axis: int, sizes: list[int], batch: int, product: bool
) -> tuple[int, int] | None:
    """The axis of a reshaped tensor that has the batch, and what is outside it in that axis.

    `before` values are outside the batch. An axis that is the batch alone comes first, then one that it leads; the last
    axis of what a product reads are features.
    """
    candidates = []
    outside = 1
    for place, size in enumerate(sizes):
        if size and before % outside == 0 and size % (batch * (before // outside)) == 0:
            candidates.append((place, before // outside))
        outside *= size
    if product and len(sizes) > 1:
        candidates = [candidate for candidate in candidates if candidate[0] != len(sizes) - 1]
    return min(
        candidates,
        key=lambda candidate: (
            sizes[candidate[0]] != batch,
            candidate[1] != 1,
            candidate[0] != axis,
            candidate[0],
        ),
        default=None,
    )


def apply(node: ir.Node, inputs: list[Any], opset: int) -> tuple[Tensor, ...]:
    """Compute a node from tensors."""
    operator = OPERATORS[node.op_type]
    arguments, attributes = prepare_call(node, inputs, opset)
    result = operator.run(*arguments, **attributes)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def prepare_call(node: ir.Node, inputs: list[Any], opset: int) -> tuple[list[Any], dict[str, Any]]:
    """What an operator's function is called with: known static inputs as numbers, attributes by name."""
    operator = OPERATORS[node.op_type]
    arguments = [
        value.tolist() if place in operator.static and isinstance(value, Tensor) else value
        for place, value in enumerate(inputs)
    ]
    attributes = {
        name: value
        for name, value in attributes_of(node).items()
        if name not in ("consumed_inputs",)
    }
    if node.op_type == "ConstantOfShape" and isinstance(attributes.get("value"), Tensor):
        value = attributes["value"]
        attributes = {"value": value.reshape(-1)[0].item(), "dtype": value.dtype}
    if operator.opset:
        attributes["opset"] = opset
    if operator.count:
        attributes["count"] = len(node.outputs)
    return arguments, attributes


def check_operator(node: ir.Node, where: str) -> None:
    """Refuse operators that cannot be computed."""
    if node.op_type in OPERATORS and node.domain in ("", "ai.onnx"):
        return
    description = describe_node(node)
    if node.op_type in CONTROL_FLOW or node.op_type.startswith("Sequence"):
        raise InputError(
            where,
            f"{description} decides by what the picture shows",
            "export the model without loops and branches",
        )
    if node.op_type in QUANTISED or node.op_type.startswith("QLinear"):
        raise InputError(
            where,
            f"{description}: the file is quantised to integers",
            "give it with QuantizeLinear and DequantizeLinear (QDQ)",
        )
    if node.domain not in ("", "ai.onnx"):
        hint = "export the model without it"
        if node.domain.startswith("com.microsoft"):
            hint = "give the file as it was exported, before ONNX Runtime optimised it"
        raise InputError(where, f"{description} is of the custom domain '{node.domain}'", hint)
    raise InputError(
        where, f"{description} is no operator that can be computed", "export the model without it"
    )


def to_torch_type(dtype: ir.DataType | None) -> torch.dtype:
    """A value's type in torch; half precision is float32."""
    return torch.float32 if dtype is None else dtype_of(int(dtype))


def read_initializer(value: ir.Value, where: str) -> Tensor:
    """A constant of a branch, which is in the file itself."""
    if value.const_value is None or isinstance(value.const_value, ir.ExternalTensor):
        raise InputError(
            where, f"the constant '{text_of(value)}' of a branch is not in the file", HINT
        )
    return to_torch(value.const_value.numpy())


def _constant_value(node: ir.Node) -> Tensor:
    name, attribute = next(iter(node.attributes.items()))
    value = attribute.value
    if attribute.type == ir.AttributeType.TENSOR:
        return torch.from_numpy(
            value.numpy()
        )  # the reader has put it into memory that may be written to
    return torch.tensor(value, dtype=torch.float32 if "float" in name else torch.int64)
