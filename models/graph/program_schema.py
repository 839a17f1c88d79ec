"""Builds a program's JSON anew from what it says: torch.export generates source code from the names of a program.

Nothing of the file's is copied. Values, weights and symbols are called by numbers that are made here, operators and
their arguments as torch calls them, and what is not listed here (guards, traces, module paths, custom metadata, specs)
is left out. The sizes of what the program computes are left out, too: torch computes them from those of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils import _pytree as pytree

from gemel.models.errors import one_line
from gemel.models.graph.program_fields import (
    ProgramFault,
    check_integer,
    check_list,
    check_number,
    check_truth,
    get_list,
    get_mapping,
    get_text,
    get_variant,
)
from gemel.models.graph.program_operators import (
    PLAIN_OPERATORS,
    SIZE_OPERATORS,
    ProgramOperator,
    SizeBounds,
    check_text,
    find_operator,
)
from gemel.models.graph.program_sizes import SizeParser

MAX_NODES = 5_000
"""Torch takes 5 ms of processor time for each; vision transformers have about a thousand."""
MAX_AXES = 16
FREE_BATCH = 2
"""What torch computes a free size with, where the file does not say."""
DTYPES = frozenset({1, 2, 3, 4, 5, 6, 7, 8, 12, 13})
"""Integers, floats and bool, as torch._export.serde.schema.ScalarType numbers them."""
MEMORY_FORMATS = frozenset({1, 2, 3, 4})
STRIDED = 7
"""Of schema.Layout."""
POSITIONAL, KEYWORD = 1, 2
"""Of schema.ArgumentKind."""
VERIFIERS = frozenset({"TRAINING", "ATEN"})
CPU = {"type": "cpu", "index": None}
WEIGHTS, CONSTANTS = "weights", "constants"
PARAMETER, BUFFER, TENSOR_CONSTANT = "parameter", "buffer", "tensor_constant"
WEIGHT_NAMES = {
    PARAMETER: "parameter_name",
    BUFFER: "buffer_name",
    TENSOR_CONSTANT: "tensor_constant_name",
}
SIZE_KINDS = {"as_sym_int": "as_int", "as_sym_float": "as_float", "as_sym_bool": "as_bool"}


@dataclass(frozen=True)
class ProgramWeight:
    """A weight of a program: our name, the file's key of a state dict, which of its lists holds it."""

    name: str
    key: str
    group: str
    is_trained: bool


@dataclass(frozen=True)
class ProgramDocument:
    """A program's JSON built anew; its weights; the file's names of what it takes and of what leaves it."""

    tree: dict[str, Any]
    weights: tuple[ProgramWeight, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def rebuild_program(tree: dict[str, Any]) -> ProgramDocument:
    """The document of a program's JSON; ProgramFault for one that is malformed or does what is not listed."""
    return _Rebuilder().rebuild(tree)


class _Rebuilder:
    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.operators: dict[str, ProgramOperator] = {}
        self.weights: dict[tuple[str, str], ProgramWeight] = {}
        self.mutable: dict[str, str] = {}
        self.sizes = SizeParser()
        self.bounds = SizeBounds()
        self.tensors: dict[str, Any] = {}
        self.numbers: dict[str, dict[str, Any]] = {kind: {} for kind in SIZE_KINDS}
        self.described: dict[str, Any] = {}
        self.plain: dict[str, Callable[[Any], Any]] = {
            "as_tensor": self.read_tensor,
            "as_tensors": partial(_map, self.read_tensor),
            "as_optional_tensor": self.read_optional,
            "as_optional_tensors": partial(_map, self.read_optional),
            "as_none": lambda value: True,
            "as_int": check_integer,
            "as_ints": partial(_map, check_integer),
            "as_float": check_number,
            "as_floats": partial(_map, check_number),
            "as_bool": check_truth,
            "as_bools": partial(_map, check_truth),
            "as_sym_int": partial(self.read_number, "as_int", check_integer),
            "as_sym_ints": partial(_map, partial(self.read_number, "as_int", check_integer)),
            "as_sym_float": partial(self.read_number, "as_float", check_number),
            "as_sym_floats": partial(_map, partial(self.read_number, "as_float", check_number)),
            "as_sym_bool": partial(self.read_number, "as_bool", check_truth),
            "as_sym_bools": partial(_map, partial(self.read_number, "as_bool", check_truth)),
            "as_scalar_type": _check_dtype,
            "as_memory_format": _check_memory_format,
            "as_layout": partial(check_integer, least=STRIDED, greatest=STRIDED),
            "as_device": lambda value: CPU,
        }

    def rebuild(self, tree: dict[str, Any]) -> ProgramDocument:
        module = get_mapping(tree, "graph_module")
        graph = get_mapping(module, "graph")
        signature = get_mapping(module, "signature")
        self.described = get_mapping(graph, "tensor_values")
        nodes = get_list(graph, "nodes")
        if not nodes or len(nodes) > MAX_NODES:
            raise ProgramFault(
                f"its program has {len(nodes)} nodes, and up to {MAX_NODES} are read",
                PLAIN_OPERATORS,
            )
        graph_inputs = get_list(graph, "inputs")
        inputs = self.define_inputs(graph_inputs, get_list(signature, "input_specs"))
        rebuilt_nodes = [self.rebuild_node(node) for node in nodes]
        outputs = get_list(graph, "outputs")
        rebuilt_outputs = [self.rebuild_output(output) for output in outputs]
        output_specs = self.rebuild_output_specs(
            get_list(signature, "output_specs"), rebuilt_outputs
        )
        taken = [spec["user_input"]["arg"] for spec in inputs if "user_input" in spec]
        answers = [spec for spec in output_specs if "user_output" in spec]
        rebuilt_graph = {
            "inputs": [_argument_of(spec) for spec in inputs],
            "outputs": rebuilt_outputs,
            "nodes": rebuilt_nodes,
            "tensor_values": self.tensors,
            "sym_int_values": self.numbers["as_sym_int"],
            "sym_float_values": self.numbers["as_sym_float"],
            "sym_bool_values": self.numbers["as_sym_bool"],
            "is_single_tensor_return": False,
            "custom_obj_values": {},
        }
        rebuilt = {
            "graph_module": {
                "graph": rebuilt_graph,
                "signature": {"input_specs": inputs, "output_specs": output_specs},
                "module_call_graph": [_describe_call(len(taken), len(answers))],
                "metadata": {},
                "treespec_namedtuple_fields": {},
            },
            "opset_version": {
                "aten": check_integer(get_mapping(tree, "opset_version").get("aten"), 0, 1000)
            },
            "range_constraints": self.rebuild_ranges(get_mapping(tree, "range_constraints")),
            "schema_version": _check_version(get_mapping(tree, "schema_version")),
            "verifiers": _check_verifiers(get_list(tree, "verifiers")),
            "guards_code": [],
        }
        originals = {number: name for name, number in self.values.items()}
        return ProgramDocument(
            rebuilt,
            tuple(self.weights.values()),
            tuple(originals[argument["as_tensor"]["name"]] for argument in taken),
            tuple(originals.get(_name_of(spec["user_output"]["arg"]), "") for spec in answers),
        )

    # Names

    def define(self, name: object) -> str:
        """The number of a value that is made here."""
        if not isinstance(name, str) or name in self.values:
            raise ProgramFault(f"its program makes '{one_line(str(name)[:200])}' twice")
        number = self.values[name] = f"v{len(self.values)}"
        return number

    def read(self, name: object) -> str:
        """The number of a value that was made before."""
        if not isinstance(name, str) or name not in self.values:
            raise ProgramFault(
                f"its program reads '{one_line(str(name)[:200])}', which nothing makes"
            )
        return self.values[name]

    def define_tensor(self, reference: Any) -> dict[str, str]:
        name = get_text(reference, "name")
        number = self.define(name)
        self.tensors[number] = _describe_tensor(
            _check_dtype(get_mapping(self.described, name).get("dtype")), [], []
        )
        return {"name": number}

    def read_tensor(self, reference: Any) -> dict[str, str]:
        return {"name": self.read(get_text(reference, "name"))}

    def read_optional(self, value: Any) -> dict[str, Any]:
        kind, content = get_variant(value)
        if kind == "as_none":
            return {"as_none": True}
        if kind != "as_tensor":
            raise ProgramFault(
                f"its program holds objects or branches ({one_line(kind[:200])})", PLAIN_OPERATORS
            )
        return {"as_tensor": self.read_tensor(content)}

    def read_number(self, plain: str, check: Callable[[Any], Any], value: Any) -> dict[str, Any]:
        kind, content = get_variant(value)
        if kind == "as_name":
            return {"as_name": self.read(content)}
        if kind != plain:
            raise ProgramFault("its program has no number where one belongs")
        return {plain: check(content)}

    # Inputs

    def define_inputs(self, graph_inputs: list[Any], specs: list[Any]) -> list[dict[str, Any]]:
        """The specs of what the graph takes, in its order: weights, and what the user gives."""
        if len(graph_inputs) != len(specs):
            raise ProgramFault("its program describes other inputs than its graph takes")
        return [
            self.define_input(value, spec) for value, spec in zip(graph_inputs, specs, strict=True)
        ]

    def define_input(self, graph_input: Any, spec: Any) -> dict[str, Any]:
        kind, content = get_variant(spec)
        input_kind, reference = get_variant(graph_input)
        if input_kind != "as_tensor" or kind not in (*WEIGHT_NAMES, "user_input"):
            raise ProgramFault(
                "its program takes an input that is no tensor",
                "export a model that takes the picture alone",
            )
        name = get_text(reference, "name")
        number = self.define(name)
        described = get_mapping(self.described, name)
        self.tensors[number] = self.describe_input(described)
        if kind == "user_input":
            if get_variant(content.get("arg") if isinstance(content, dict) else None) != (
                input_kind,
                reference,
            ):
                raise ProgramFault("its program describes other inputs than its graph takes")
            return {kind: {"arg": {"as_tensor": {"name": number}}}}
        if get_text(get_mapping(content, "arg"), "name") != name:
            raise ProgramFault("its program describes other inputs than its graph takes")
        weight = self.define_weight(kind, content)
        rebuilt: dict[str, Any] = {"arg": {"name": number}, WEIGHT_NAMES[kind]: weight.name}
        if kind == BUFFER:
            rebuilt["persistent"] = weight.group == WEIGHTS
        return {kind: rebuilt}

    def define_weight(self, kind: str, content: Any) -> ProgramWeight:
        key = get_text(content, WEIGHT_NAMES[kind])
        is_stored = kind == PARAMETER or (kind == BUFFER and check_truth(content.get("persistent")))
        group = WEIGHTS if is_stored else CONSTANTS
        if (group, key) in self.weights:
            raise ProgramFault(f"its program takes the weight '{one_line(key[:200])}' twice")
        weight = ProgramWeight(f"w{len(self.weights)}", key, group, kind == PARAMETER)
        self.weights[group, key] = weight
        if kind == BUFFER:
            self.mutable[key] = weight.name
        return weight

    def describe_input(self, described: dict[str, Any]) -> dict[str, Any]:
        sizes = [self.rebuild_size(size) for size in get_list(described, "sizes")]
        strides = [self.rebuild_size(stride) for stride in get_list(described, "strides")]
        if len(sizes) > MAX_AXES or len(strides) != len(sizes):
            raise ProgramFault(
                f"its program takes a tensor of {len(sizes)} axes and {len(strides)} strides"
            )
        return _describe_tensor(_check_dtype(described.get("dtype")), sizes, strides)

    def rebuild_size(self, size: Any) -> dict[str, Any]:
        kind, content = get_variant(size)
        if kind == "as_int":
            return {"as_int": check_integer(content, 0)}
        if kind != "as_expr":
            raise ProgramFault("its program has an input without sizes")
        hint = content.get("hint") if isinstance(content, dict) else None
        value = (
            FREE_BATCH
            if hint is None
            else check_integer(get_mapping(content, "hint").get("as_int"), 0)
        )
        return {
            "as_expr": {
                "expr_str": self.sizes.rewrite(get_text(content, "expr_str")),
                "hint": {"as_int": value},
            }
        }

    def rebuild_ranges(self, ranges: dict[str, Any]) -> dict[str, Any]:
        """The least and the most of the symbols that the inputs' sizes hold."""
        symbols = self.sizes.symbols
        return {
            number: _check_range(ranges[symbol])
            for symbol, number in symbols.items()
            if symbol in ranges
        }

    # Nodes

    def rebuild_node(self, node: Any) -> dict[str, Any]:
        target = get_text(node, "target")
        operator = self.operators.get(target)
        if operator is None:
            operator = self.operators[target] = find_operator(target)
        inputs = [
            self.rebuild_argument(operator, argument) for argument in get_list(node, "inputs")
        ]
        outputs = [self.define_output(output) for output in get_list(node, "outputs")]
        if operator.target in SIZE_OPERATORS:
            self.bound_size(operator.target, inputs, outputs)
        elif not outputs and not operator.returns_nothing:
            raise ProgramFault("its program has a node that makes nothing")
        return {"target": operator.target, "inputs": inputs, "outputs": outputs, "metadata": {}}

    def rebuild_argument(self, operator: ProgramOperator, argument: Any) -> dict[str, Any]:
        name = get_text(argument, "name")
        if operator.arguments is None:
            name = ""
        elif name not in operator.arguments:
            raise ProgramFault(
                f"its program gives {operator.target} an argument '{one_line(name[:200])}'"
            )
        kind = argument.get("kind")
        rebuilt = {"name": name, "arg": self.rebuild_value(name, argument.get("arg"))}
        return (
            rebuilt
            if kind is None
            else rebuilt | {"kind": check_integer(kind, POSITIONAL, KEYWORD)}
        )

    def rebuild_value(self, name: str, value: Any) -> dict[str, Any]:
        kind, content = get_variant(value)
        if kind == "as_string":
            return {kind: check_text(name, content)}
        if kind not in self.plain:
            raise ProgramFault(
                f"its program holds objects or branches ({one_line(kind[:200])})", PLAIN_OPERATORS
            )
        return {kind: self.plain[kind](content)}

    def define_output(self, output: Any) -> dict[str, Any]:
        kind, content = get_variant(output)
        if kind == "as_tensor":
            return {kind: self.define_tensor(content)}
        if kind == "as_tensors":
            return {kind: [self.define_tensor(element) for element in check_list(content)]}
        if kind == "as_none":
            return {kind: True}
        if kind not in SIZE_KINDS:
            raise ProgramFault(
                f"its program makes what is no tensor ({one_line(kind[:200])})", PLAIN_OPERATORS
            )
        number = self.define(get_text(content, "as_name"))
        self.numbers[kind][number] = {
            SIZE_KINDS[kind]: {"as_int": 1, "as_float": 1.0, "as_bool": True}[SIZE_KINDS[kind]]
        }
        return {kind: {"as_name": number}}

    def bound_size(
        self, target: str, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]
    ) -> None:
        if len(outputs) != 1 or next(iter(outputs[0])) not in SIZE_KINDS:
            raise ProgramFault("its program computes a size that is no number")
        operands = []
        for argument in inputs:
            content = next(iter(argument["arg"].values()))
            operands.append(next(iter(content.values())) if isinstance(content, dict) else content)
        self.bounds.add(target, operands, next(iter(outputs[0].values()))["as_name"])

    # Outputs

    def rebuild_output(self, output: Any) -> dict[str, Any]:
        kind, _ = get_variant(output)
        if kind not in ("as_tensor", "as_none", "as_int", "as_float", "as_bool", *SIZE_KINDS):
            raise ProgramFault(
                "its program answers with an object", "export a model that returns tensors"
            )
        return self.rebuild_value("", output)

    def rebuild_output_specs(
        self, specs: list[Any], outputs: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        if len(specs) != len(outputs):
            raise ProgramFault("its program describes other outputs than its graph makes")
        return [
            self.rebuild_output_spec(spec, output)
            for spec, output in zip(specs, outputs, strict=True)
        ]

    def rebuild_output_spec(self, spec: Any, output: dict[str, Any]) -> dict[str, Any]:
        kind, content = get_variant(spec)
        if kind == "user_output":
            return {kind: {"arg": output}}
        key = get_text(content, "buffer_name") if kind == "buffer_mutation" else None
        if key not in self.mutable or "as_tensor" not in output:
            raise ProgramFault(
                f"its program changes what it takes ({one_line(kind[:200])})",
                "call model.eval() first",
            )
        return {kind: {"arg": output["as_tensor"], "buffer_name": self.mutable[key]}}


def _map(rebuild: Callable[[Any], Any], values: Any) -> list[Any]:
    return [rebuild(value) for value in check_list(values)]


def _argument_of(spec: dict[str, Any]) -> dict[str, Any]:
    """The argument of a graph that an input's spec describes."""
    kind, content = next(iter(spec.items()))
    return content["arg"] if kind == "user_input" else {"as_tensor": content["arg"]}


def _name_of(argument: dict[str, Any]) -> str:
    """The number of the tensor that an argument names."""
    content = argument.get("as_tensor")
    return content["name"] if content else ""


def _check_dtype(value: Any) -> int:
    if type(value) is not int or value not in DTYPES:
        raise ProgramFault(
            "its program has tensors that are no integers, floats or bools", "export it in float32"
        )
    return value


def _check_memory_format(value: Any) -> int:
    if type(value) is not int or value not in MEMORY_FORMATS:
        raise ProgramFault("its program has a memory format that torch does not know")
    return value


def _describe_tensor(
    dtype: int, sizes: list[dict[str, Any]], strides: list[dict[str, Any]]
) -> dict[str, Any]:
    """A tensor on the CPU, of one that is not trained."""
    return {
        "dtype": dtype,
        "sizes": sizes,
        "requires_grad": False,
        "device": CPU,
        "strides": strides,
        "storage_offset": {"as_int": 0},
        "layout": STRIDED,
    }


def _check_range(value: Any) -> dict[str, Any]:
    least, greatest = (
        value.get(key) if isinstance(value, dict) else None for key in ("min_val", "max_val")
    )
    return {
        "min_val": None if least is None else check_integer(least),
        "max_val": None if greatest is None else check_integer(greatest),
    }


def _check_version(version: dict[str, Any]) -> dict[str, int]:
    return {key: check_integer(version.get(key), 0, 1000) for key in ("major", "minor")}


def _check_verifiers(names: list[Any]) -> list[str]:
    if not all(isinstance(name, str) and name in VERIFIERS for name in names):
        raise ProgramFault(
            "its program is of a dialect that torch.export does not write", PLAIN_OPERATORS
        )
    return names


def _describe_call(inputs: int, outputs: int) -> dict[str, Any]:
    """How a model is called that takes and answers with so many tensors."""
    taken = tuple(range(inputs))
    answered = tuple(range(outputs))
    specs = pytree.tree_structure((taken, {})), pytree.tree_structure(answered)
    in_spec, out_spec = (pytree.treespec_dumps(spec) for spec in specs)
    return {
        "fqn": "",
        "signature": {
            "inputs": [],
            "outputs": [],
            "in_spec": in_spec,
            "out_spec": out_spec,
            "forward_arg_names": None,
        },
    }
