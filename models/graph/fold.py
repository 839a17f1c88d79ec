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
from gemel.models.graph.node_calls import (
    apply,
    check_operator,
    constant_value,
    read_initializer,
    to_torch_type,
)
from gemel.models.graph.operators import OPERATORS
from gemel.models.graph.operators.operator_registry import integers, number
from gemel.models.graph.operators.recurrent import ACTIVATIONS, FIRST_STATES, LENGTHS
from gemel.models.graph.operators.shapes import dtype_of
from gemel.models.graph.torch_values import attributes_of
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
COUNTED = ("NonZero", "Unique", "Compress")
"""Operators whose results have as many values as the picture decides."""
COUNTED_HINT = (
    "give its PyTorch weights to the zoo's model of that name (fasterrcnn_..., keypointrcnn_...) or its code as "
    "package.module:factory"
)
ALONG_AXIS = {
    "Softmax", "LogSoftmax", "ArgMax", "ArgMin", "TopK", "CumSum", "Gather", "GatherElements", "Concat",
    "Split", "LpNormalization", "ScatterElements",
}  # fmt: skip
"""Operators that mix what is along their axis."""
FROM_END = ("Softmax", "LogSoftmax", "TopK", "LpNormalization")
"""Those whose axis is the last one where they do not name it; of others it is the first."""
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
            value: (list(first.shape), list(second.shape))
            for value, (first, second) in self.tensors.items()
        }
        dtypes = {value: pair[0].dtype for value, pair in self.tensors.items()}
        is_free = self.free != "no"
        return Folded(self.constants, shapes, dtypes, self.batch, is_free, tuple(self.led))

    def remove_folded(self) -> None:
        """Remove the nodes whose results are constants; an output that is one is copied from it."""
        for output in self.graph.outputs:
            if self.pair(output) is None:
                problem = f"the output '{text_of(output)}' is made by no node"
                raise InputError(self.where, problem, HINT)
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
            node.domain = ""
            _make(node, "Identity", 1)
            node.replace_input_with(0, self.new_constant(value))

    def pair(self, value: ir.Value | None) -> Pair | None:
        """A value at both batch sizes: on the CPU where it is known, else on the meta device."""
        if value is None:
            return None
        constant = self.constants.get(value)
        return (constant, constant) if constant is not None else self.tensors.get(value)

    def fault(self, node: ir.Node, problem: str, hint: str = HINT) -> InputError:
        """The error of a file for what one of its nodes does."""
        return InputError(self.where, f"{describe_node(node)}{problem}", hint)

    def visit(self, node: ir.Node) -> None:
        """Compute a node, or find the sizes of what it gives."""
        # Branches that are spliced in, and nodes that are rewritten, count too.
        self.steps += 1
        if self.steps > MAX_NODES:
            raise InputError(self.where, f"has more than {MAX_NODES} nodes", HINT)
        if node.op_type == "Constant":
            return self.set_constant(node, [constant_value(node)])
        if node.op_type == "If" and self.splice_branch(node):
            return None
        check_operator(node, self.where)
        source = node.inputs[0] if node.inputs else None
        if source is not None and self.does_nothing(node, source):
            return self.forward(node, source)
        if node.op_type in ACTIVATIONS:
            self.drop_defaults(node)
        inputs = [self.pair(value) for value in node.inputs]
        for value, pair in zip(node.inputs, inputs):
            if value is not None and pair is None:
                text = text_of(value, self.graph)
                raise self.fault(node, f" reads '{text}', which nothing makes")
        # The sizes of the picture are known, though its values are not.
        if node.op_type in ("Shape", "Size"):
            first, second = (self.compute(node, [tensor]) for tensor in inputs[0] or ())
            return self.set_known(node, first, second)
        if all(pair is None or _is_known(pair) for pair in inputs):
            return self.fold(node, inputs)
        if node.op_type in COUNTED:
            problem = " counts what the picture shows, as the regions of a two-stage detector"
            raise self.fault(node, problem, COUNTED_HINT)
        if node.op_type == "Gather" and self.unstride(node):
            return None
        if self.free == "fixed":
            inputs = self.free_batch(node, inputs)
        return self.set_sizes(node, inputs)

    def fold(self, node: ir.Node, inputs: list[Pair | None]) -> None:
        """Compute a node that the picture does not decide, for real."""
        self.check_folded(node, inputs)
        first = self.compute(node, [pair and pair[0] for pair in inputs])
        second = first
        # What follows from the batch differs between the two runs.
        if any(pair is not None and pair[0] is not pair[1] for pair in inputs):
            second = self.compute(node, [pair and pair[1] for pair in inputs])
        return self.set_known(node, first, second)

    def set_sizes(self, node: ir.Node, inputs: list[Pair | None]) -> None:
        """Find the sizes of what a node gives at both batch sizes, and whether these keep frames apart."""
        first, second = (self.find_sizes(node, inputs, run) for run in (0, 1))
        self.count_frame(node, first.operations)
        results = first.results, second.results
        count = len(first.results)
        if len(node.outputs) > count:
            problem = f" has {len(node.outputs)} outputs, of which {count} are computed"
            raise self.fault(node, problem, "export the model without the others")
        if self.free == "dynamic":
            self.settle(node, inputs, results)
        self.check_batch(node, inputs, results)
        outer = next((self.outer[value] for value in node.inputs if value in self.outer), 1)
        for output, one_batch, two_batches in zip(node.outputs, *results):
            self.tensors[output] = (one_batch, two_batches)
            if outer != 1:
                self.outer.setdefault(output, outer)

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
        sequence = self.pair(node.inputs[0])
        usual: dict[int, int] = dict.fromkeys(FIRST_STATES[node.op_type], 0)
        if sequence is not None:
            usual[LENGTHS] = sequence[0].shape[_integer_of(node, "layout", 0)]
        for place, value in usual.items():
            setting = self.pair(node.inputs[place]) if place < len(node.inputs) else None
            # torch's layers take neither; with their usual values they say nothing.
            if (
                setting
                and _is_known(setting)
                and all((tensor == value).all() for tensor in setting)
            ):
                node.replace_input_with(place, None)

    # Computing

    def meta(self, node: ir.Node, inputs: list[Pair | None], run: int) -> list[Tensor | None]:
        static = OPERATORS[node.op_type].static
        tensors = []
        for place, pair in enumerate(inputs):
            tensor = None if pair is None else pair[run]
            if tensor is None:
                pass
            elif place not in static:
                # Mixed devices fail in torch: constants become sizes alone, too.
                tensor = tensor.to("meta")
            elif tensor.is_meta:
                raise self.fault(node, ": a shape or bound depends on what the picture shows")
            tensors.append(tensor)
        return tensors

    def compute(self, node: ir.Node, inputs: list[Tensor | None]) -> tuple[Tensor, ...]:
        try:
            result = apply(node, inputs, self.opset)
        except InputError:
            raise
        except Exception as error:  # torch raises many kinds for sizes that do not fit
            text = str(error).split("\n", 1)[0]
            raise self.fault(node, f" cannot be computed: {text}") from error
        total = sum(tensor.nbytes for tensor in result)
        if total > MAX_TENSOR_BYTES:
            raise self.fault(node, f" makes a tensor of {total} bytes")
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
            raise self.fault(node, " reads constants alone")
        count = _count_new(node, [pair[1] for pair in inputs if pair is not None])
        if count is None:
            result = self.find_sizes(node, inputs, 1)
            nbytes = sum(tensor.nbytes for tensor in result.results)
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
        """Note what a node gives: a constant where both batch sizes give the same."""
        if first is second or all(map(torch.equal, first, second)):
            return self.set_constant(node, first)
        for output, one_batch, two_batches in zip(node.outputs, first, second):
            self.tensors[output] = (one_batch, two_batches)
        return None

    def set_constant(self, node: ir.Node, results: Any) -> None:
        sources = (value for value in node.inputs if value in self.constants)
        source = next(sources, None)  # type: ignore[arg-type]
        for output, tensor in zip(node.outputs, results):
            # A weight that was cast or transposed keeps the name of the file's.
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
        condition = self.constants.get(node.inputs[0]) if node.inputs else None  # type: ignore[arg-type]
        if condition is None:
            return False
        name = "then_branch" if bool(condition) else "else_branch"
        branch: ir.Graph = node.attributes[name].value
        for value in branch.initializers.values():
            self.constants[value] = read_initializer(value, self.where)
        inner = list(branch)
        results = list(branch.outputs)
        branch.outputs.clear()
        branch.remove(inner)
        self.graph.insert_before(node, inner)
        for member in inner:
            self.visit(member)
        for old, new in zip(node.outputs, results):
            new = self.spliced.get(new, new)
            # An output of the graph keeps its name, which what the branch gives cannot have.
            if old.is_graph_output():
                bridge = ir.node("Identity", [new], outputs=None)
                (new,) = bridge.outputs
                self.graph.insert_before(node, bridge)
                pass_name(old, new, "_before")
                outputs = self.graph.outputs
                outputs[:] = [new if output is old else output for output in outputs]
                self.visit(bridge)
            old.replace_all_uses_with(new)
            self.spliced[old] = new
        return True

    # The batch

    def axis_of(self, pair: Pair | None) -> int | None:
        """The axis of a tensor along which the batch is."""
        if pair is None or pair[0].ndim != pair[1].ndim:
            return None
        return next(iter(_changed_axes(*pair)), None)

    def free_batch(self, node: ir.Node, inputs: list[Pair | None]) -> list[Pair | None]:
        """Rewrite a node whose constants fix the batch; what its inputs are from then on."""
        axis = self.axis_of(inputs[0])
        if node.op_type in ("Reshape", "Squeeze", "Flatten") and axis is not None:
            return self.free_reshape(node, inputs, axis)
        if node.op_type in ("Concat", "GatherElements", "ScatterElements"):
            axes = {self.axis_of(pair) for pair in inputs} - {None}
            if len(axes) == 1:
                return self.expand_batch(node, inputs, axes.pop())  # type: ignore[arg-type]
        return inputs

    def free_reshape(
        self, node: ir.Node, inputs: list[Pair | None], axis: int
    ) -> list[Pair | None]:
        """Let a node whose sizes fix the batch, which is along this axis, compute the batch's size."""
        assert inputs[0] is not None and node.inputs[0] is not None
        (result,) = self.find_sizes(node, inputs, 0).results
        before = math.prod(inputs[0][0].shape[:axis]) * self.outer.get(node.inputs[0], 1)
        uses = node.outputs[0].uses()
        product = any(user.op_type in ("Gemm", "MatMul") and place == 0 for user, place in uses)
        home = _find_batch(before, axis, list(result.shape), self.batch, product)
        if home is None:
            raise BatchError(f"{describe_node(node)} splits the batch")
        self.outer[node.outputs[0]] = home.outer
        sizes = list(result.shape)
        sizes[home.axis] = -1
        return self.replace_reshape(node, inputs, sizes)

    def unstride(self, node: ir.Node) -> bool:
        """Make a Gather that only permutes a flat tensor, as torch exports as_strided, a Reshape and a Transpose."""
        values = node.inputs[0]
        places = self.constants.get(node.inputs[1])  # type: ignore[arg-type]
        source = values.producer() if values is not None else None
        if places is None or places.ndim < 2 or source is None or source.op_type != "Reshape":
            return False
        if self.tensors[values][0].shape != (places.numel(),):  # type: ignore[index]
            return False
        # The stride of an axis is the place of its second element; a batch of one has none, and comes first.
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
        _make(node, "Transpose", 1)
        node.attributes["perm"] = ir.AttrInt64s("perm", back)
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
        # Its axis is split around the batch, which then goes first; the others become what they were.
        sizes[axis : axis + 1] = [outer, -1, sizes[axis] // self.batch // outer]
        split = ir.node("Reshape", [output, self.new_constant(torch.tensor(sizes))])
        order = list(range(len(sizes)))
        order.insert(0, order.pop(axis + 1))
        lead = ir.node("Transpose", [split.outputs[0]], {"perm": order})
        target = self.new_constant(torch.tensor([-1, *pair[0].shape]))
        joined = ir.node("Reshape", [lead.outputs[0], target])
        self.outer.pop(output, None)
        pass_name(output, joined.outputs[0], "_inside")
        self.graph.outputs[place] = joined.outputs[0]
        self.led.append(text_of(joined.outputs[0]))
        self.graph.extend([split, lead, joined])
        self.visit_unchecked([split, lead, joined])

    def visit_unchecked(self, nodes: list[ir.Node]) -> None:
        """Visit nodes that move the batch knowingly, which would be refused in a file."""
        mode = self.free
        self.free = "expanding"
        for node in nodes:
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
            _make(node, "Reshape", 2)
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
        pairs = list(zip(node.inputs, inputs))
        reader = next(value for value, pair in pairs if self.axis_of(pair) is not None)
        for place, (value, pair) in enumerate(pairs):
            if pair is None or value is None or self.axis_of(pair) is not None:
                continue
            rank = pair[0].ndim
            # Where the tensors are joined along the batch, or this one has another, frames would mix.
            if _integer_of(node, "axis", 0) % rank == axis or pair[0].shape[axis] != self.batch:
                raise BatchError(f"{describe_node(node)} joins tensors along the batch")
            # Its sizes times (1, .., batch, .., 1), the batch read off a tensor that has one.
            size = ir.node("Shape", [reader])
            index = self.new_constant(torch.tensor([axis]))
            length = ir.node("Gather", [size.outputs[0], index], {"axis": 0})
            parts = [length.outputs[0]]
            if axis:
                parts.insert(0, self.new_constant(torch.ones(axis, dtype=torch.int64)))
            if axis + 1 < rank:
                parts.append(self.new_constant(torch.ones(rank - axis - 1, dtype=torch.int64)))
            target = ir.node("Concat", parts, {"axis": 0})
            wide = ir.node("Expand", [value, target.outputs[0]])
            nodes = [size, length, target, wide]
            self.graph.insert_before(node, nodes)
            self.visit_unchecked(nodes)
            node.replace_input_with(place, wide.outputs[0])
            expanded[place] = self.tensors[wide.outputs[0]]
        return expanded

    def settle(self, node: ir.Node, inputs: list[Pair | None], results: Any) -> None:
        """Replace sizes that depend on the batch by constant ones where -1 or 1 says the same."""
        if node.op_type not in ("Reshape", "Expand") or inputs[1] is None:
            return
        if inputs[1][0] is inputs[1][1]:  # its sizes do not depend on the batch
            return
        (first,), (second,) = results
        axes = _changed_axes(first, second)
        if first.ndim != second.ndim or len(axes) != 1 or 0 in first.shape:
            return
        sizes = list(first.shape)
        if node.op_type == "Reshape":
            sizes[axes[0]] = -1
            self.replace_reshape(node, inputs, sizes)
        elif self.axis_of(inputs[0]) is not None and inputs[0][0].ndim == first.ndim:  # type: ignore[index]
            sizes[axes[0]] = 1
            node.replace_input_with(1, self.new_constant(torch.tensor(sizes, dtype=torch.int64)))

    def check_batch(self, node: ir.Node, inputs: list[Pair | None], results: Any) -> None:
        """Refuse to free a batch that this node would mix."""
        if self.free not in ("fixed", "dynamic"):
            return
        axes = [self.axis_of(pair) for pair in inputs]
        if all(axis is None for axis in axes):
            return
        for a, b in zip(*results):
            changed = _changed_axes(a, b)
            # Twice the batch is twice as long in one axis, and nowhere else.
            is_single = a.ndim == b.ndim and len(changed) == 1
            if not is_single or b.shape[changed[0]] != 2 * a.shape[changed[0]]:
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


def _is_known(pair: Pair) -> bool:
    return not pair[0].is_meta and not pair[1].is_meta


def _changed_axes(first: Tensor, second: Tensor) -> list[int]:
    """The axes in which the sizes at the two batch sizes differ."""
    sizes = enumerate(zip(first.shape, second.shape))
    return [axis for axis, (size, other) in sizes if size != other]


def _integer_of(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def _make(node: ir.Node, op_type: str, inputs: int) -> None:
    """Let a node be another operator, without attributes."""
    node.op_type = op_type
    node.attributes.clear()
    node.resize_inputs(inputs)


def _mixes(node: ir.Node, inputs: list[Pair | None], axes: list[int | None]) -> bool:
    """Whether a node computes with values of several frames, the batch being along these axes of its inputs."""
    axis, pair = next((axis, pair) for axis, pair in zip(axes, inputs) if axis is not None)
    assert pair is not None
    rank = pair[0].ndim
    if node.op_type in ALONG_AXIS:
        return _integer_of(node, "axis", -1 if node.op_type in FROM_END else 0) % rank == axis
    if node.op_type == "Slice" and len(inputs) > 3 and inputs[3] is not None:
        return axis in [int(sliced) % rank for sliced in inputs[3][0].reshape(-1).tolist()]
    if node.op_type in ("LayerNormalization", "RMSNormalization"):
        return axis >= _integer_of(node, "axis", -1) % rank
    if node.op_type in ACTIVATIONS:
        # The batch is the second axis, behind the sequence, unless the layout turns them.
        return axis != (0 if _integer_of(node, "layout", 0) else 1)
    return node.op_type in ("GatherND", "ScatterND", "NonZero", "OneHot")


@dataclass(frozen=True)
class _BatchHome:
    """The axis of a tensor that has the batch, and what is outside the batch in that axis."""

    axis: int
    outer: int


def _find_batch(
    before: int, axis: int, sizes: list[int], batch: int, product: bool
) -> _BatchHome | None:
    """Where the batch is in a reshaped tensor; `before` values were outside it, along `axis`.

    An axis that is the batch alone comes first, then one that it leads; the last axis of what a product reads are
    features.
    """
    homes = []
    outside = 1
    for place, size in enumerate(sizes):
        if size and before % outside == 0 and size % (batch * (before // outside)) == 0:
            homes.append(_BatchHome(place, before // outside))
        outside *= size
    if product and len(sizes) > 1:
        homes = [home for home in homes if home.axis != len(sizes) - 1]

    def rank(home: _BatchHome) -> tuple[bool, bool, bool, int]:
        return sizes[home.axis] != batch, home.outer != 1, home.axis != axis, home.axis

    return min(homes, key=rank, default=None)
