"""The gate that every foreign graph passes before a library sees it: .onnx files, what a .pt2 became, stored documents.

What comes out has the file's structure and numbers, and no text of it: values, nodes and functions are called by
numbers, attributes are those that their operator lists, and only weights of the main graph may lie in another file.
The table of names leads back to the file's own. This module needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError

from gemel.models.errors import InputError
from gemel.models.graph.document_bounds import HINT, MAX_OPSET, MIN_OPSET, check_fields, count_nodes
from gemel.models.graph.inline import LOCAL, inline_functions
from gemel.models.graph.schemas import BRANCHING, LISTED, STANDARD, standard_attributes

WEIGHTS = "weights.bin"
"""Where a document says that its weights are."""
WHERE = "the graph of a model"
BUFFER = "buffer"
"""The doc_string of a weight that is not trained."""
MAX_TEXT_BYTES = 65_536
"""Of one string of an attribute."""
DAMAGED = "copy or build the bundle again"
KEY = re.compile(r"\w{1,200}(\.\w{1,200})*", re.ASCII)
"""A key of a state dict."""
OPERATOR = re.compile(r"[\w.:/+-]{1,200}", re.ASCII)
"""The name of another domain, or of an operator that is not ONNX's."""
ATTRIBUTE = re.compile(r"[A-Za-z]\w{0,99}", re.ASCII)
FREE_SIZE = re.compile(r"[A-Za-z_]\w{0,99}", re.ASCII)
STORED_SIZE = re.compile(r"(\d{1,9}\*)?batch", re.ASCII)
PLACE = re.compile(r"\d{1,19}", re.ASCII)
STANDARD_NAMES = (STANDARD, "ai.onnx")

_KIND = onnx.AttributeProto
_FIELDS: dict[int, str] = {
    _KIND.FLOAT: "f", _KIND.INT: "i", _KIND.STRING: "s", _KIND.TENSOR: "t", _KIND.GRAPH: "g",
    _KIND.FLOATS: "floats", _KIND.INTS: "ints", _KIND.STRINGS: "strings",
}  # fmt: skip
"""The field of each type of attribute that is read."""
_PLAIN = frozenset(_FIELDS) - {_KIND.GRAPH}


class GraphKind(Enum):
    """Where a graph comes from, which decides what it may hold."""

    FILE = "file"
    DOCUMENT = "document"
    """Of a bundle: computed operators alone, and no weight that is not the bundle's."""
    TAIL = "tail"
    """What was cut off a file's end and is only written again: nothing outside it."""


@dataclass(frozen=True)
class GatedGraph:
    """An ONNX model in which every name is a number; `names` has the file's name of each, `metadata` its props.

    Of a document the weights keep their names, which are keys of a state dict.
    """

    model: onnx.ModelProto
    names: Mapping[str, str]
    metadata: dict[str, str]


def admit_graph(
    data: bytes, where: str | Path, kind: GraphKind = GraphKind.FILE, keep_ends: bool = False
) -> GatedGraph:
    """The gated graph of an ONNX model's bytes; InputError for one that is damaged, too large or not permitted.

    With `keep_ends` the inputs and outputs keep their names: for what is only changed and written again.
    """
    check_fields(data, str(where))
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise InputError(where, "is damaged or is no ONNX file", HINT) from error
    return gate_model(model, where, kind, keep_ends)


def gate_model(
    model: onnx.ModelProto, where: str | Path, kind: GraphKind, keep_ends: bool = False
) -> GatedGraph:
    """As `admit_graph`, of a model in memory, which is changed in place."""
    if not model.HasField("graph") or not model.graph.node:
        raise InputError(where, "is no ONNX file, or one without a graph", HINT)
    model.DiscardUnknownFields()
    count_nodes(model, str(where))
    gate = _Gate(str(where), kind)
    if keep_ends:
        gate.numbers.keep(value.name for value in (*model.graph.input, *model.graph.output))
    return gate.pass_model(model)


def write_model(model: onnx.ModelProto, metadata: Mapping[str, str]) -> bytes:
    """The bytes of a document with these props: equal for equal graphs, whatever nodes and inner values are called."""
    gated = gate_model(model, WHERE, GraphKind.DOCUMENT, keep_ends=True)
    del gated.model.metadata_props[:]
    for key, text in metadata.items():
        gated.model.metadata_props.add(key=key, value=text)
    return gated.model.SerializeToString(deterministic=True)


class _Gate:
    def __init__(self, where: str, kind: GraphKind) -> None:
        self.where = where
        self.kind = kind
        self.numbers = ValueNumbers()
        self.names: dict[str, str] = {}
        self.nodes = 0
        self.functions: dict[tuple[str, str, str], str] = {}
        self.own_domains: set[str] = set()
        self.parameters: dict[str, str] = {}
        self.listed = standard_attributes()

    def pass_model(self, model: onnx.ModelProto) -> GatedGraph:
        metadata = {entry.key: entry.value for entry in model.metadata_props}
        self.check_functions(model)
        opsets = self.pass_opsets(model.opset_import)
        # Of other versions the meaning of attributes is not known here.
        if not MIN_OPSET <= opsets.get(STANDARD, 0) <= MAX_OPSET:
            problem = f"is of opset {opsets.get(STANDARD, 0)}, and opsets {MIN_OPSET} to {MAX_OPSET} are read"
            raise InputError(self.where, problem, "export it with opset 18")
        if self.kind is GraphKind.DOCUMENT:
            self.numbers.keep(
                value.name for value in model.graph.initializer if KEY.fullmatch(value.name)
            )
        self.pass_graph(model.graph, is_main=True)
        for function in model.functions:
            self.pass_function(function, opsets)
        inline_functions(model, self.numbers, self.where)
        keep_fields(model, {"ir_version", "opset_import", "graph"})
        self.names.update(self.numbers.names)
        return GatedGraph(model, self.names, metadata)

    def pass_opsets(self, imports: Any) -> dict[str, int]:
        """Rewrite imported versions in place, each domain once; what they are then."""
        versions: dict[str, int] = {}
        for entry in imports:
            if entry.domain in self.own_domains:
                continue
            domain = self.check_domain(entry.domain)
            versions[domain] = max(versions.get(domain, 0), entry.version)
        del imports[:]
        for domain, version in versions.items():
            imports.add(domain=domain, version=version)
        return versions

    # Names

    def check_domain(self, domain: str) -> str:
        if domain in STANDARD_NAMES:
            return STANDARD
        if not OPERATOR.fullmatch(domain):
            raise InputError(self.where, f"names the domain '{domain}'", HINT)
        return domain

    def check_functions(self, model: onnx.ModelProto) -> None:
        """Number the file's own functions; a document has none."""
        if model.functions and self.kind is not GraphKind.FILE:
            raise InputError(self.where, "has functions", DAMAGED)
        for number, function in enumerate(model.functions):
            key = (function.domain, function.name, function.overload)
            if key in self.functions:
                raise InputError(self.where, f"has two functions '{function.name}'", HINT)
            self.functions[key] = f"f{number}"
            if function.domain not in STANDARD_NAMES:
                self.own_domains.add(function.domain)

    def parameter(self, name: str) -> str:
        """The number of a function's attribute."""
        return self.parameters.setdefault(name, f"a{len(self.parameters)}")

    # Graphs

    def pass_graph(
        self, graph: onnx.GraphProto, is_main: bool = False, in_function: bool = False
    ) -> None:
        if graph.sparse_initializer:
            raise InputError(self.where, "has sparse weights", "export it with dense ones")
        for tensor in graph.initializer:
            self.pass_tensor(tensor, tensor.name, can_lie_outside=is_main)
            tensor.name = self.numbers.number(tensor.name)
        for info in (*graph.input, *graph.output):
            self.pass_value(info)
        for node in graph.node:
            self.pass_node(node, in_function)
        if self.kind is GraphKind.DOCUMENT:  # whose sizes were found when it was written
            for info in graph.value_info:
                self.pass_value(info)
            keep_fields(graph, {"node", "initializer", "input", "output", "value_info"})
        else:
            keep_fields(graph, {"node", "initializer", "input", "output"})
        graph.name = "graph"

    def pass_function(self, function: onnx.FunctionProto, opsets: Mapping[str, int]) -> None:
        function.name = self.functions[function.domain, function.name, function.overload]
        function.domain = LOCAL
        for values in (function.input, function.output):
            values[:] = [self.numbers.number(name) for name in values]
        function.attribute[:] = [self.parameter(name) for name in function.attribute]
        for attribute in function.attribute_proto:
            self.pass_attribute(attribute, _PLAIN, "a function", in_function=False)
            attribute.name = self.parameter(attribute.name)
        opset = self.pass_opsets(function.opset_import).get(STANDARD)
        if opset not in (None, opsets[STANDARD]):
            problem = f"its functions cannot be inlined: one is of opset {opset}, the graph of {opsets[STANDARD]}"
            raise InputError(self.where, problem, HINT)
        for node in function.node:
            self.pass_node(node, in_function=True)
        keep_fields(
            function,
            {
                "name",
                "domain",
                "input",
                "output",
                "attribute",
                "attribute_proto",
                "opset_import",
                "node",
            },
        )

    def pass_value(self, info: onnx.ValueInfoProto) -> None:
        """Keep a tensor's type and sizes; other types say nothing that is read."""
        info.name = self.numbers.number(info.name)
        if not info.type.HasField("tensor_type"):
            keep_fields(info, {"name"})
            return
        keep_fields(info, {"name", "type"})
        keep_fields(info.type, {"tensor_type"})
        for size in info.type.tensor_type.shape.dim:
            keep_fields(size, {"dim_value", "dim_param"})
            if not size.HasField("dim_param"):
                continue
            if self.kind is not GraphKind.DOCUMENT:
                if not FREE_SIZE.fullmatch(size.dim_param):
                    size.ClearField("dim_param")
            elif not (STORED_SIZE.fullmatch(size.dim_param) or FREE_SIZE.fullmatch(size.dim_param)):
                raise InputError(self.where, f"has a size '{size.dim_param}'", DAMAGED)

    def pass_node(self, node: onnx.NodeProto, in_function: bool) -> None:
        description = describe_operator(node, node.name)
        name = f"n{self.nodes}"
        self.nodes += 1
        if node.name:
            self.names[name] = node.name
        node.name = name
        node.input[:] = [self.numbers.number(value) for value in node.input]
        node.output[:] = [self.numbers.number(value) for value in node.output]
        function = (
            self.functions.get((node.domain, node.op_type, node.overload))
            if self.functions
            else None
        )
        if function is not None:
            node.domain = LOCAL
            node.op_type = function
            self.pass_call(node, description, in_function)
        else:
            self.pass_operator(node, description, in_function)
        keep_fields(node, {"input", "output", "name", "op_type", "domain", "attribute"})

    def pass_call(self, node: onnx.NodeProto, description: str, in_function: bool) -> None:
        """A node that calls one of the file's functions."""
        for attribute in node.attribute:
            self.pass_attribute(attribute, _PLAIN, description, in_function)
            attribute.name = self.parameter(attribute.name)

    def pass_operator(self, node: onnx.NodeProto, description: str, in_function: bool) -> None:
        node.domain = self.check_domain(node.domain)
        is_standard = node.domain == STANDARD
        # What a bundle holds was computed when it was built, by these operators alone.
        if self.kind is GraphKind.DOCUMENT and not (is_standard and node.op_type in LISTED):
            raise InputError(
                self.where, f"{description} is no operator that can be computed", DAMAGED
            )
        listed = self.listed.get(node.op_type) if is_standard else None
        if listed is None and not OPERATOR.fullmatch(node.op_type):
            raise InputError(self.where, f"{description} is no operator", HINT)
        inner = [
            place
            for place, attribute in enumerate(node.attribute)
            if attribute.name.startswith("__")
        ]
        for place in reversed(inner):  # an exporter's own notes, which ONNX lets every reader skip
            del node.attribute[place]
        for attribute in node.attribute:
            types = _PLAIN if listed is None else listed.get(attribute.name)
            if types is None or (listed is None and not ATTRIBUTE.fullmatch(attribute.name)):
                raise InputError(
                    self.where, f"{description} has no attribute '{attribute.name}'", HINT
                )
            if node.op_type not in BRANCHING:
                types = types & _PLAIN
            self.pass_attribute(attribute, types, description, in_function)

    # Values

    def pass_attribute(
        self,
        attribute: onnx.AttributeProto,
        types: Iterable[int],
        description: str,
        in_function: bool,
    ) -> None:
        """Keep an attribute's value, or a reference to a function's parameter, and nothing else."""
        field = _FIELDS.get(attribute.type)
        if field is None or attribute.type not in types:
            raise InputError(
                self.where,
                f"{description}: the attribute '{attribute.name}' has a type that is not read",
                HINT,
            )
        # In a function the value is that of the call.
        if attribute.ref_attr_name:
            if not in_function:
                raise InputError(
                    self.where,
                    f"{description}: '{attribute.name}' refers to no function's attribute",
                    HINT,
                )
            attribute.ref_attr_name = self.parameter(attribute.ref_attr_name)
            keep_fields(attribute, {"name", "type", "ref_attr_name"})
            return
        keep_fields(attribute, {"name", "type", field})
        if field == "t":
            self.pass_tensor(attribute.t, description, can_lie_outside=False)
            attribute.t.ClearField("name")
        elif field == "g":
            self.pass_graph(attribute.g, in_function=in_function)
        elif field in ("s", "strings"):
            texts = attribute.strings if field == "strings" else [attribute.s]
            if any(len(text) > MAX_TEXT_BYTES for text in texts):
                raise InputError(
                    self.where, f"{description}: a text of '{attribute.name}' is too long", HINT
                )

    def pass_tensor(
        self, tensor: onnx.TensorProto, description: str, can_lie_outside: bool
    ) -> None:
        is_buffer = self.kind is GraphKind.DOCUMENT and tensor.doc_string == BUFFER
        for field in ("doc_string", "metadata_props"):
            tensor.ClearField(field)
        if tensor.HasField("segment"):
            raise InputError(self.where, f"the tensor of '{description}' is in segments", HINT)
        # Its values are in the message itself; a place that it names besides is not followed.
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            tensor.ClearField("external_data")
            return
        if not can_lie_outside or self.kind is GraphKind.TAIL:
            allowed = "where only weights of the graph itself may be"
            problem = f"the values of '{description}' are in another file, {allowed}"
            raise InputError(self.where, problem, "export it again with its constants inside")
        places = {entry.key: entry.value for entry in tensor.external_data}
        if not all(PLACE.fullmatch(places.get(key, "0")) for key in ("offset", "length")):
            raise InputError(
                self.where, f"the weight '{description}' is at no place of its file", HINT
            )
        if self.kind is GraphKind.DOCUMENT:
            self.check_stored(tensor, places.get("location"))
        keep_fields(tensor, {"name", "dims", "data_type", "data_location", "external_data"})
        if is_buffer:
            tensor.doc_string = BUFFER

    def check_stored(self, tensor: onnx.TensorProto, location: str | None) -> None:
        """Refuse a document's weight that is not one of its bundle."""
        if location != WEIGHTS:
            raise InputError(self.where, f"the weight '{tensor.name}' is in another file", DAMAGED)
        if not KEY.fullmatch(tensor.name):
            raise InputError(self.where, f"'{tensor.name}' is no weight's name", DAMAGED)


class ValueNumbers:
    """Numbers for the names of values, one for each text; names that are kept are never used as numbers."""

    def __init__(self) -> None:
        self.by_text: dict[str, str] = {"": ""}
        self.names: dict[str, str] = {}
        self._kept: set[str] = set()
        self._copies: dict[str, int] = {}
        self._next = 0

    def keep(self, texts: Iterable[str]) -> None:
        """Let these texts be their own names."""
        self._kept.update(texts)
        self.by_text.update((text, text) for text in self._kept)

    def number(self, text: str) -> str:
        """The number of a text."""
        number = self.by_text.get(text)
        if number is None:
            number = self.by_text[text] = self._take(text)
        return number

    def copy(self, number: str) -> str:
        """The number of another value that the file calls by the same text; only the first has it unchanged."""
        text = self.names.get(number, number)
        count = self._copies[number] = self._copies.get(number, 0) + 1
        return self._take(text if count == 1 else f"{text}/{count}")

    def _take(self, text: str) -> str:
        while (number := f"v{self._next}") in self._kept:
            self._next += 1
        self._next += 1
        self.names[number] = text
        return number


def keep_fields(message: Any, names: Iterable[str]) -> None:
    """Clear every other field of a protobuf message."""
    for field, _ in message.ListFields():
        if field.name not in names:
            message.ClearField(field.name)


def describe_operator(node: Any, name: str) -> str:
    """The operator of a node and the node's name, for messages."""
    operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    return f"{operator} (node '{name}')" if name else operator
