"""The gate of foreign graphs: what comes out has numbers for names, listed attributes, and no function."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from gemel.models.errors import InputError
from gemel.models.graph.gate import GatedGraph, GraphKind, admit_graph
from gemel.models.graph.operators import OPERATORS
from gemel.models.graph.schemas import COMPUTED, LISTED, standard_attributes

WEIGHT = numpy_helper.from_array(np.ones((2, 3, 1, 1), np.float32), "first.weight")


def make_model(*nodes: onnx.NodeProto, functions=(), weights=(WEIGHT,)) -> onnx.ModelProto:
    """A model whose last node's result is its output."""
    graph = helper.make_graph(
        nodes, "net", [helper.make_tensor_value_info("picture", TensorProto.FLOAT, ["N", 3, 8, 8])],
        [onnx.ValueInfoProto(name=nodes[-1].output[0])], list(weights),
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], functions=functions, ir_version=9)


def conv(**attributes) -> onnx.NodeProto:
    return helper.make_node("Conv", ["picture", "first.weight"], ["answer"], name="/first/Conv", **attributes)


def admit(model: onnx.ModelProto, kind: GraphKind = GraphKind.FILE) -> GatedGraph:
    return admit_graph(model.SerializeToString(), "m.onnx", kind)


def stored_model(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    """A model whose weight is a bundle's."""
    weight = TensorProto(name="first.weight", dims=[2, 3, 1, 1], data_type=1, data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="weights.bin")
    return make_model(*(nodes or (conv(),)), weights=[weight])


def test_names_become_numbers_that_lead_back():
    model = make_model(conv(pads=[0] * 4))
    model.metadata_props.add(key="names", value="{}")
    model.producer_name, model.graph.doc_string, model.graph.node[0].doc_string = "somebody", "text", "text"
    gated = admit(model)
    (node,) = gated.model.graph.node
    assert {gated.names[name] for name in (*node.input, *node.output)} == {"picture", "first.weight", "answer"}
    assert gated.names[node.name] == "/first/Conv"
    assert gated.metadata == {"names": "{}"} and not gated.model.metadata_props
    for text in (b"picture", b"first", b"answer", b"somebody", b"text", b"net"):
        assert text not in gated.model.SerializeToString()


def test_numbers_of_a_document_are_never_those_of_its_weights():
    model = stored_model(conv(), helper.make_node("Relu", ["answer"], ["v1"]))
    model.graph.initializer[0].name = model.graph.node[0].input[1] = "v0"
    graph = admit(model, GraphKind.DOCUMENT).model.graph
    assert graph.initializer[0].name == graph.node[0].input[1] == "v0"
    assert len({graph.input[0].name, graph.node[0].output[0], graph.node[1].output[0], "v0"}) == 4


def test_attributes_that_no_version_lists_are_refused():
    with pytest.raises(InputError, match="has no attribute 'padding'"):
        admit(make_model(conv(padding=[0])))


def test_attributes_of_another_type_are_refused():
    with pytest.raises(InputError, match="'group' has a type"):
        admit(make_model(conv(group=1.0)))


def test_notes_of_an_exporter_are_left_out():
    node = conv(group=1)
    node.attribute.add(name="__source", type=AttributeProto.STRING, s=b"layer.py:3")
    (gated,) = admit(make_model(node)).model.graph.node
    assert [attribute.name for attribute in gated.attribute] == ["group"]


def test_an_attribute_has_no_value_but_that_of_its_type():
    node = conv(group=1)
    node.attribute[0].t.CopyFrom(WEIGHT)
    (attribute,) = admit(make_model(node)).model.graph.node[0].attribute
    assert attribute.i == 1 and not attribute.HasField("t")


def twice(**attributes) -> onnx.ModelProto:
    """A graph that calls a function twice, once with its attribute's default."""
    body = [helper.make_node("LeakyRelu", ["a"], ["t"]), helper.make_node("Neg", ["t"], ["b"])]
    body[0].attribute.add(name="alpha", type=AttributeProto.FLOAT, ref_attr_name="slope")
    function = helper.make_function("own", "Leak", ["a"], ["b"], body, [helper.make_opsetid("", 18)])
    function.attribute_proto.append(helper.make_attribute("slope", 0.25))
    calls = [
        helper.make_node("Leak", ["answer"], ["once"], domain="own", **attributes),
        helper.make_node("Leak", ["once"], ["twice"], domain="own"),
    ]
    return make_model(conv(), *calls, functions=[function])


def test_functions_are_put_where_they_are_called():
    gated = admit(twice(slope=0.5))
    graph = gated.model.graph
    assert [node.op_type for node in graph.node] == ["Conv", "LeakyRelu", "Neg", "LeakyRelu", "Neg"]
    assert [node.attribute[0].f for node in graph.node if node.op_type == "LeakyRelu"] == [0.5, 0.25]
    for before, after in zip(graph.node, list(graph.node)[1:]):
        assert after.input[0] == before.output[0]
    texts = [gated.names[node.output[0]] for node in graph.node]
    assert texts[2] == "once" and texts[4] == "twice" and len(set(texts)) == 5
    assert not gated.model.functions and not any(node.domain for node in graph.node)


def test_a_function_that_gives_its_input_is_an_identity():
    function = helper.make_function("own", "Same", ["a"], ["a"], [helper.make_node("Relu", ["a"], ["b"])], [])
    graph = admit(make_model(conv(), helper.make_node("Same", ["answer"], ["y"], domain="own"), functions=[function]))
    relu, identity = list(graph.model.graph.node)[1:]
    assert identity.op_type == "Identity" and identity.input == relu.input


def test_a_call_with_too_many_inputs_is_refused():
    model = twice()
    model.graph.node[1].input.append("picture")
    with pytest.raises(InputError, match="more values than the function"):
        admit(model)


def branch() -> onnx.NodeProto:
    inner = helper.make_graph([helper.make_node("Relu", ["answer"], ["r"])], "b", [], [onnx.ValueInfoProto(name="r")])
    return helper.make_node("If", ["answer"], ["y"], then_branch=inner, else_branch=inner)


def unary(kind: str, **options) -> onnx.NodeProto:
    return helper.make_node(kind, ["answer"], ["y"], **options)


NOT_STORED: dict[str, tuple[Callable[[onnx.ModelProto], object], str]] = {
    "a function": (lambda model: model.functions.extend(twice().functions), "has functions"),
    "a branch": (lambda model: model.graph.node.append(branch()), "If is no operator"),
    "chance": (lambda model: model.graph.node.append(unary("RandomNormalLike")), "Random"),
    "another domain": (lambda model: model.graph.node.append(unary("Relu", domain="com.evil")), "com.evil"),
    "a weight of another file": (
        lambda model: setattr(model.graph.initializer[0].external_data[0], "value", "/etc/passwd"), "in another file",
    ),
    "a weight at no place": (
        lambda model: model.graph.initializer[0].external_data.add(key="offset", value="-8"), "at no place",
    ),
    "a weight with a path": (lambda model: setattr(model.graph.initializer[0], "name", "a/b"), "no weight's name"),
    "a size that is a formula": (
        lambda model: setattr(model.graph.input[0].type.tensor_type.shape.dim[0], "dim_param", "9**9"), "has a size",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_STORED)
def test_a_document_holds_listed_operators_and_its_bundles_weights(name):
    change, problem = NOT_STORED[name]
    model = stored_model()
    admit(model, GraphKind.DOCUMENT)
    change(model)
    with pytest.raises(InputError, match=problem):
        admit(model, GraphKind.DOCUMENT)


def test_what_was_cut_off_has_nothing_in_other_files():
    with pytest.raises(InputError, match="in another file"):
        admit(stored_model(), GraphKind.TAIL)


def test_computed_operators_are_those_that_are_registered():
    assert set(OPERATORS) == COMPUTED and set(standard_attributes()) > LISTED > COMPUTED


def test_the_gate_needs_no_torch():
    code = "import sys, gemel.models.graph.gate, gemel.models.bundle.query_documents; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
