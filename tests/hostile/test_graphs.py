"""Graphs written to hurt: names that are code, constants elsewhere, and files of kilobytes that ask for hours.

Nothing that a graph says becomes code or is opened, whatever is verified, built and run; work is counted before it is
done. Times are processor times, with room for a busy machine.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from gemel.models.bundle import BundleQuery, Made, open_bundle, verify_bundle, write_bundle, writer
from gemel.models.errors import GemelError, InputError
from gemel.models.graph import build_graph
from gemel.models.graph.fill import fill_graph
from gemel.models.graph.onnx_reader import read_graph
from gemel.models.graph.stored import restore_graph, store_graph
from gemel.models.workload import load_workload
from gemel.models.zoo import build_query
from tests.models.graph.onnx_files import write_classifier

MAX_SECONDS, MAX_BYTES = 5.0, 10**9
CHAIN_SECONDS = 5.0
"""For 20,000 nodes, which take 1.3 s where nothing else runs."""
FLOAT = TensorProto.FLOAT
SECRET = b"SECRET-SECRET-SECRET-SECRET-SECR"
WEIGHT = numpy_helper.from_array(np.linspace(-1, 1, 4 * 3 * 9, dtype=np.float32).reshape(4, 3, 3, 3), "w")
CONV = helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4)


def payloads(mark: Path) -> list[str]:
    """Names that make a file once they are Python: as a string's end, an attribute, a parameter, a keyword, a line."""
    code = f'__import__("os").system("touch {mark}")'
    return [
        f'k") if getattr(__import__("os"),"system")("touch {mark}") else getattr(getattr(self, "d"), "k',
        f"x={code}",
        f"x, y={code}",
        f"x)\n{code}\n#",
        f"x: {code}",
        f"'+{code}+'",
        f"{{{code}}}",
        f"]; {code}; [",
    ]


def texts(mark: Path) -> list[str]:
    """Each ASCII character within a name, and the payloads."""
    return [f"a{chr(code)}b" for code in range(128)] + payloads(mark)


def make_graph(nodes, inits=(), output="y", functions=(), picture="x") -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info(picture, FLOAT, ["N", 3, 8, 8])],
        [helper.make_tensor_value_info(output, FLOAT, None)], list(inits),
    )  # fmt: skip
    opsets = [
        helper.make_opsetid("", 18),
        *({one.domain: helper.make_opsetid(one.domain, 1) for one in functions}).values(),
    ]
    return helper.make_model(graph, opset_imports=opsets, functions=list(functions), ir_version=9)


def save(folder: Path, model: onnx.ModelProto) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def run_document(document: bytes) -> None:
    """Build a stored graph and run it once, in training and in eval mode."""
    graph = restore_graph(document)
    network = build_graph(graph.document)
    picture = torch.zeros([1, *(int(side) for side in graph.input.shape[1:])])
    for mode in (True, False):
        network.train(mode)(picture)


# Names


def name_everything(text: str) -> onnx.ModelProto:
    """A graph in which every name that a file may choose freely is, or ends with, a text."""
    function = helper.make_function(
        f"d{text}", f"f{text}", [f"p{text}"], [f"q{text}"],
        [helper.make_node("LeakyRelu", [f"p{text}"], [f"q{text}"], name=f"n{text}")],
        [helper.make_opsetid("", 18)], attributes=[f"z{text}"],
    )  # fmt: skip
    function.node[0].attribute.add(name="alpha", type=onnx.AttributeProto.FLOAT, ref_attr_name=f"z{text}")
    call = helper.make_node(f"f{text}", [f"v{text}"], [f"u{text}"], domain=f"d{text}")
    call.attribute.add(name=f"z{text}", type=onnx.AttributeProto.FLOAT, f=0.5)
    nodes = [
        helper.make_node("Conv", [f"x{text}", f"w{text}"], [f"v{text}"], name=f"conv{text}", pads=[1] * 4),
        call,
        helper.make_node("Mul", [f"u{text}", f"k{text}"], [f"m{text}"], doc_string=text),
        helper.make_node("Add", [f"m{text}", f"s{text}"], [f"y{text}"], name=text),
    ]
    constants = {
        "w": numpy_helper.to_array(WEIGHT),
        "k": np.ones((1, 4, 8, 8), np.float32),
        "s": np.ones((), np.float32),
    }
    inits = [numpy_helper.from_array(values, f"{name}{text}") for name, values in constants.items()]
    model = make_graph(nodes, inits, f"y{text}", [function], f"x{text}")
    model.producer_name = model.domain = model.doc_string = model.graph.name = model.graph.doc_string = text
    model.metadata_props.add(key=text, value=text)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = text
    return model


def test_names_of_a_file_never_run_and_come_out_again(tmp_path):
    mark = tmp_path / "mark"
    for text in texts(mark):
        graph = read_graph(save(tmp_path, name_everything(text)))
        assert (graph.input.name, graph.outputs[0].name) == (f"x{text}", f"y{text}")
        assert all(part.isidentifier() or part.isalnum() for key in graph.state for part in key.split("."))
        document = store_graph(graph)
        run_document(document)
        arrays = {key: weight.numpy() for key, weight in graph.state.items()}
        written = fill_graph(document, arrays.__getitem__).to_proto()
        names = [value.name for value in (*written.graph.input, *written.graph.output)]
        assert names == [f"x{text}", f"y{text}"]
        assert not mark.exists(), repr(text)


REFUSED_NAMES: dict[str, Callable[[onnx.ModelProto, str], object]] = {
    "an attribute": lambda model, text: model.graph.node[0].attribute.add(name=text, type=onnx.AttributeProto.INT, i=1),
    "an operator": lambda model, text: setattr(model.graph.node[1], "op_type", text),
    "a domain": lambda model, text: setattr(model.graph.node[1], "domain", text),
    "another opset": lambda model, text: model.opset_import.add(domain=text, version=1),
}


@pytest.mark.parametrize("place", REFUSED_NAMES)
@pytest.mark.parametrize("stored", [False, True])
def test_names_that_a_file_may_not_choose_never_run(tmp_path, place, stored):
    mark = tmp_path / "mark"
    path = save(tmp_path, make_graph([CONV, helper.make_node("Relu", ["c"], ["y"])], [WEIGHT]))
    plain = onnx.load_from_string(store_graph(read_graph(path)))
    for text in texts(mark):
        model = plain if stored else onnx.load(path)
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        REFUSED_NAMES[place](changed, text)
        try:
            if stored:
                run_document(changed.SerializeToString())
            else:
                run_document(store_graph(read_graph(save(tmp_path, changed))))
        except InputError as error:
            assert "\n" not in str(error)
        else:
            assert place == "another opset", f"{text!r} was read as {place}"
        assert not mark.exists(), repr(text)


def rename_value(model: onnx.ModelProto, old: str, new: str) -> None:
    for values in (*(node.input for node in model.graph.node), *(node.output for node in model.graph.node)):
        values[:] = [new if name == old else name for name in values]
    for item in (*model.graph.initializer, *model.graph.input, *model.graph.output):
        item.name = new if item.name == old else item.name


STORED_NAMES: dict[str, Callable[[onnx.ModelProto], str]] = {
    "input": lambda model: model.graph.input[0].name,
    "output": lambda model: model.graph.output[0].name,
    "value": lambda model: model.graph.node[0].output[0],
    "weight": lambda model: next(one.name for one in model.graph.initializer if one.external_data),
    "constant": lambda model: next(one.name for one in model.graph.initializer if not one.external_data),
}


@pytest.mark.parametrize("place", STORED_NAMES)
def test_names_of_a_stored_graph_never_run(tmp_path, place):
    mark = tmp_path / "mark"
    nodes = [CONV, helper.make_node("Add", ["c", "k"], ["d"]), helper.make_node("Relu", ["d"], ["y"])]
    constant = numpy_helper.from_array(np.full((), 2, np.float32), "k")
    plain = onnx.load_from_string(store_graph(read_graph(save(tmp_path, make_graph(nodes, [WEIGHT, constant])))))
    for text in texts(mark):
        model = onnx.ModelProto()
        model.CopyFrom(plain)
        rename_value(model, STORED_NAMES[place](model), text)
        model.graph.node[0].name = model.graph.node[1].doc_string = text
        model.metadata_props.add(key=text, value=text)
        try:
            run_document(model.SerializeToString())
        except InputError as error:
            assert "\n" not in str(error) and place == "weight", f"{text!r}: {error}"
        assert not mark.exists(), repr(text)


def add_constant(model: onnx.ModelProto, name: str) -> None:
    """Add a constant to what the first node reads, beside one whose path makes a submodule."""
    picture = model.graph.input[0].name
    rename_value(model, picture, "picture")
    model.graph.input[0].name = picture
    for number, constant in enumerate((name, "d.k")):
        model.graph.initializer.append(numpy_helper.from_array(np.zeros((1, 1, 1, 1), np.float32), constant))
        before, after = (picture, "between") if number == 0 else ("between", "picture")
        model.graph.node.insert(number, helper.make_node("Add", [before, constant], [after]))


def add_attribute(model: onnx.ModelProto, name: str) -> None:
    relu = next(node for node in model.graph.node if node.op_type == "Relu")
    relu.attribute.add(name=name, type=onnx.AttributeProto.INT, i=1)


@pytest.mark.parametrize("change", [add_constant, add_attribute])
def test_a_bundle_of_a_hostile_graph_runs_no_code(tmp_path, monkeypatch, change):
    mark = tmp_path / "mark"
    write_classifier(tmp_path / "gate.onnx", scales=0.5)
    query = {"id": "gate", "camera": "one", "model": "gate.onnx"}
    workload = {"name": "w", "cameras": {"one": {"source": "one.mp4"}}, "queries": [query]}
    (tmp_path / "w.yaml").write_text(json.dumps(workload))
    (query,) = load_workload(tmp_path / "w.yaml").queries
    model, honest = build_query(query), writer._document_of
    for number, name in enumerate(payloads(mark)):

        def document_of(module: torch.nn.Module, name: str = name) -> torch.Tensor:
            changed = onnx.load_from_string(bytes(honest(module).numpy()))
            change(changed, name)
            return torch.frombuffer(bytearray(changed.SerializeToString(deterministic=True)), dtype=torch.uint8)

        monkeypatch.setattr(writer, "_document_of", document_of)
        path = tmp_path / f"box{number}"
        write_bundle(path, {query.id: model}, [BundleQuery.of(query)], Made("w", "none", 0))
        verify_bundle(path)
        try:
            built = open_bundle(path).build(query.id)
            built(torch.zeros(1, 3, 16, 16))
        except GemelError as error:
            assert change is add_attribute and "\n" not in str(error)
        assert not mark.exists(), name


# Values that lie elsewhere


def elsewhere(location: str, dims: list[int], dtype: int = FLOAT) -> onnx.TensorProto:
    tensor = TensorProto(name="k", dims=dims, data_type=dtype, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    return tensor


def constant_elsewhere(location: str) -> onnx.ModelProto:
    node = helper.make_node("Constant", [], ["k"], value=elsewhere(location, [1, 1, 1, 8]))
    return make_graph([CONV, node, helper.make_node("Add", ["c", "k"], ["y"])], [WEIGHT])


def bytes_elsewhere(location: str) -> onnx.ModelProto:
    node = helper.make_node("Constant", [], ["b"], value=elsewhere(location, [32], TensorProto.UINT8))
    cast = helper.make_node("Cast", ["b"], ["f"], to=FLOAT)
    total = helper.make_node("ReduceSum", ["f"], ["k"], keepdims=0)
    return make_graph([CONV, node, cast, total, helper.make_node("Add", ["c", "k"], ["y"])], [WEIGHT])


def fill_elsewhere(location: str) -> onnx.ModelProto:
    shape = numpy_helper.from_array(np.array([1, 1, 1, 8]), "s")
    node = helper.make_node("ConstantOfShape", ["s"], ["k"], value=elsewhere(location, [1]))
    return make_graph([CONV, node, helper.make_node("Add", ["c", "k"], ["y"])], [WEIGHT, shape])


def function_elsewhere(location: str) -> onnx.ModelProto:
    constant = helper.make_node("Constant", [], ["k"], value=elsewhere(location, [1, 1, 1, 8]))
    nodes = [constant, helper.make_node("Add", ["a", "k"], ["b"])]
    function = helper.make_function("d", "F", ["a"], ["b"], nodes, [helper.make_opsetid("", 18)])
    return make_graph([CONV, helper.make_node("F", ["c"], ["y"], domain="d")], [WEIGHT], functions=[function])


def branch_elsewhere(location: str, in_node: bool) -> onnx.ModelProto:
    tensor = elsewhere(location, [1, 1, 1, 8])
    node = helper.make_node("Constant", [], ["r"], value=tensor)
    node = node if in_node else helper.make_node("Identity", ["k"], ["r"])
    branch = helper.make_graph([node], "b", [], [onnx.ValueInfoProto(name="r")], [] if in_node else [tensor])
    choice = helper.make_node("If", ["true"], ["z"], then_branch=branch, else_branch=branch)
    true = numpy_helper.from_array(np.array(True), "true")
    return make_graph([CONV, choice, helper.make_node("Add", ["c", "z"], ["y"])], [WEIGHT, true])


def sparse_elsewhere(location: str) -> onnx.ModelProto:
    sparse = onnx.SparseTensorProto(dims=[8])
    sparse.values.CopyFrom(elsewhere(location, [8]))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.arange(8), "i"))
    node = helper.make_node("Constant", [], ["k"])
    node.attribute.add(name="sparse_value", type=onnx.AttributeProto.SPARSE_TENSOR).sparse_tensor.CopyFrom(sparse)
    return make_graph([CONV, node, helper.make_node("Add", ["c", "k"], ["y"])], [WEIGHT])


ELSEWHERE: dict[str, Callable[[str], onnx.ModelProto]] = {
    "a constant": constant_elsewhere,
    "bytes of a constant": bytes_elsewhere,
    "what a shape is filled with": fill_elsewhere,
    "a function's constant": function_elsewhere,
    "a branch's weight": lambda location: branch_elsewhere(location, False),
    "a branch's constant": lambda location: branch_elsewhere(location, True),
    "a sparse constant": sparse_elsewhere,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("place", ELSEWHERE)
@pytest.mark.parametrize("kind", ["file beside", "file elsewhere", "pipe"])
def test_only_weights_of_the_graph_itself_lie_in_other_files(tmp_path, monkeypatch, place, kind):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path / "models")
    secret = tmp_path / "secret.bin" if kind == "file elsewhere" else tmp_path / "models" / "secret.bin"
    if kind == "pipe":
        os.mkfifo(secret)
        writer_end = os.open(secret, os.O_RDWR | os.O_NONBLOCK)  # so that opening it would not wait for ever
    else:
        secret.write_bytes(SECRET)
    location = str(secret) if kind != "file beside" else "secret.bin"
    path = save(tmp_path / "models", ELSEWHERE[place](location))
    opened = watch_opens(secret, lambda: refusal_of(path))
    assert not opened, f"{place} was opened"
    if kind == "pipe":
        os.close(writer_end)


WATCHED: list[str] = []
"""Paths that were opened since the hook was put in, of which Python has no way to remove it."""


def watch_opens(path: Path, action: Callable[[], object]) -> bool:
    """Whether an action opens a file."""
    if not WATCHED:
        WATCHED.append("")
        sys.addaudithook(lambda event, arguments: WATCHED.append(str(arguments[0])) if event == "open" else None)
    start = len(WATCHED)
    action()
    return any(name.endswith(path.name) for name in WATCHED[start:])


@pytest.mark.timeout(60)
def test_a_weight_in_a_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe.bin")
    model = make_graph(
        [CONV, helper.make_node("Add", ["c", "k"], ["y"])], [WEIGHT, elsewhere("pipe.bin", [1, 1, 1, 8])]
    )
    assert "is in no regular file" in refusal_of(save(tmp_path, model))


def test_a_stored_graph_has_no_values_elsewhere(tmp_path):
    (tmp_path / "secret.bin").write_bytes(SECRET)
    path = save(tmp_path, make_graph([CONV, helper.make_node("Relu", ["c"], ["y"])], [WEIGHT]))
    document = onnx.load_from_string(store_graph(read_graph(path)))
    document.graph.initializer.append(elsewhere(str(tmp_path / "secret.bin"), [1, 1, 1, 8]))
    with pytest.raises(InputError, match="is in another file"):
        restore_graph(document.SerializeToString())


# Work


def refusal_of(path: Path) -> str:
    """The line that refuses a file, within bounds of time and memory."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(InputError) as refused:
        read_graph(path)
    seconds = time.process_time() - began
    nbytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    line = str(refused.value)
    assert "\n" not in line and len(line) < 1000
    assert seconds < MAX_SECONDS and nbytes < MAX_BYTES, f"{seconds:.1f} s, {nbytes >> 20} MiB: {line}"
    return line


def constant(name: str, *values: float, dtype: type = np.int64) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, dtype), name)


def reduce_and_add(nodes: list[onnx.NodeProto], values: list[str], inits: list[onnx.TensorProto]) -> onnx.ModelProto:
    """A graph that adds the greatest value of each of these to the picture."""
    nodes = [CONV, *nodes]
    nodes += [helper.make_node("ReduceMax", [name], [f"max.{name}"], keepdims=0) for name in values]
    nodes.append(helper.make_node("Sum", ["c", *(f"max.{name}" for name in values)], ["y"]))
    return make_graph(nodes, [WEIGHT, *inits])


def many_reductions() -> onnx.ModelProto:
    """A constant of 1 GiB, of which the maximum is taken 500 times."""
    nodes = [CONV, helper.make_node("ConstantOfShape", ["s"], ["z"])]
    nodes += [helper.make_node("ReduceMax", ["z"], [f"m{number}"], keepdims=0) for number in range(500)]
    nodes.append(helper.make_node("Sum", ["c", *(f"m{number}" for number in range(500))], ["y"]))
    return make_graph(nodes, [WEIGHT, constant("s", 2**28)])


def small_reductions() -> onnx.ModelProto:
    """The same of 64 MiB, which alone is no reason to refuse a file."""
    model = many_reductions()
    model.graph.initializer[1].CopyFrom(constant("s", 2**24))
    return model


def large_products() -> onnx.ModelProto:
    fill = helper.make_node("ConstantOfShape", ["s"], ["a"], value=helper.make_tensor("v", FLOAT, [1], [1.0]))
    products = [helper.make_node("MatMul", ["a", "a"], [f"p{number}"]) for number in range(50)]
    return reduce_and_add([fill, *products], [f"p{number}" for number in range(50)], [constant("s", 3000, 3000)])


def product_by_letters() -> onnx.ModelProto:
    fill = helper.make_node("ConstantOfShape", ["s"], ["a"])
    node = helper.make_node("Einsum", ["a", "a", "a"], ["e"], equation="ab,cd,ef->")
    return reduce_and_add([fill, node], ["e"], [constant("s", 2000, 2000)])


def wide_window() -> onnx.ModelProto:
    fill = helper.make_node("ConstantOfShape", ["s"], ["a"])
    node = helper.make_node("MaxPool", ["a"], ["p"], kernel_shape=[2000, 2000], pads=[999] * 4)
    return reduce_and_add([fill, node], ["p"], [constant("s", 1, 1, 3000, 3000)])


def huge_resize() -> onnx.ModelProto:
    options = {"mode": "cubic", "coordinate_transformation_mode": "half_pixel", "antialias": 1}
    node = helper.make_node("Resize", ["c", "", "s"], ["y"], **options)
    return make_graph([CONV, node], [WEIGHT, constant("s", 1, 1, 1e-6, 3e7, dtype=np.float32)])


def many_taps() -> onnx.ModelProto:
    fill = helper.make_node("ConstantOfShape", ["s"], ["a"])
    node = helper.make_node("Resize", ["a", "", "t"], ["r"], mode="linear", antialias=1)
    return reduce_and_add(
        [fill, node], ["r"], [constant("s", 1, 1, 1, 2**22), constant("t", 1, 1, 1, 2.0**-21, dtype=np.float32)]
    )


def huge_frame() -> onnx.ModelProto:
    """A product of the picture's values with themselves, 10^15 operations a frame."""
    shape = constant("s", 1, 1, 30_000, 1)
    nodes = [
        CONV,
        helper.make_node("ReduceMax", ["c"], ["m"], keepdims=1),
        helper.make_node("Expand", ["m", "s"], ["e"]),
    ]
    nodes += [
        helper.make_node("Transpose", ["e"], ["t"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["e", "t"], ["p"]),
    ]
    nodes += [helper.make_node("MatMul", ["p", "p"], [f"q{number}"]) for number in range(4)]
    nodes.append(helper.make_node("Sum", [f"q{number}" for number in range(4)], ["y"]))
    return make_graph(nodes, [WEIGHT, shape])


def many_parts() -> onnx.ModelProto:
    shape = constant("s", 2**27)
    nodes = [
        helper.make_node("ConstantOfShape", ["s"], ["a"]),
        helper.make_node("Split", ["a"], ["b"], num_outputs=2**27),
    ]
    return reduce_and_add(nodes, ["b"], [shape])


def overloads() -> onnx.ModelProto:
    """Functions that call the one before ten times, and others of the same names with another overload."""
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("d", 1)]
    relu = helper.make_node("Relu", ["a"], ["b"])
    functions = [helper.make_function("d", "F0", ["a"], ["b"], [relu], opsets)]
    for level in range(1, 9):
        names = ["a", *(f"t{number}" for number in range(9)), "b"]
        calls = [
            helper.make_node(f"F{level - 1}", [one], [two], domain="d", overload="o") for one, two in pairwise(names)
        ]
        functions.append(helper.make_function("d", f"F{level}", ["a"], ["b"], calls, opsets))
    for function in functions:
        function.overload = "o"
    others = [helper.make_function("d", f"F{level}", ["a"], ["b"], [relu], opsets) for level in range(9)]
    for function in others:
        function.overload = "z"
    call = helper.make_node("F8", ["c"], ["y"], domain="d", overload="o")
    return make_graph([CONV, call], [WEIGHT], functions=[*functions, *others])


def recursion() -> onnx.ModelProto:
    call = helper.make_node("F", ["a"], ["b"], domain="d")
    function = helper.make_function("d", "F", ["a"], ["b"], [call], [helper.make_opsetid("d", 1)])
    return make_graph([CONV, helper.make_node("F", ["c"], ["y"], domain="d")], [WEIGHT], functions=[function])


def copied_constants() -> onnx.ModelProto:
    """A function with a constant of 16 MiB, called a thousand times."""
    value = numpy_helper.from_array(np.zeros((1, 4, 1024, 1024), np.float32))
    nodes = [
        helper.make_node("Constant", [], ["k"], value=value),
        helper.make_node("ReduceMax", ["k"], ["m"], keepdims=0),
    ]
    nodes.append(helper.make_node("Add", ["a", "m"], ["b"]))
    function = helper.make_function("d", "F", ["a"], ["b"], nodes, [helper.make_opsetid("", 18)])
    names = ["c", *(f"t{number}" for number in range(999)), "y"]
    calls = [helper.make_node("F", [one], [two], domain="d") for one, two in pairwise(names)]
    return make_graph([CONV, *calls], [WEIGHT], functions=[function])


def many_weights() -> onnx.ModelProto:
    empty = [helper.make_tensor(f"i{number}", FLOAT, [0], []) for number in range(110_000)]
    return make_graph([CONV, helper.make_node("Relu", ["c"], ["y"])], [WEIGHT, *empty])


BOMBS: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "reductions of 1 GiB": (many_reductions, "would fill more than 256.0 MiB"),
    "reductions of 64 MiB": (small_reductions, "would take too long"),
    "products": (large_products, "would take too long"),
    "an Einsum": (product_by_letters, "would take too long"),
    "a wide window": (wide_window, "would take too long"),
    "a huge resize": (huge_resize, "places of an axis"),
    "taps of a resize": (many_taps, "places of an axis"),
    "a frame of 10^15 operations": (huge_frame, "one frame would take"),
    "many parts": (many_parts, ""),
    "overloads of functions": (overloads, "nodes and 100000 are read"),
    "a function that calls itself": (recursion, "calls itself"),
    "copies of a function's constant": (copied_constants, "where they are called"),
    "many weights": (many_weights, "100000 tensors"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_file_that_asks_for_too_much_work_is_refused_before_it(tmp_path, name):
    make, problem = BOMBS[name]
    assert problem in refusal_of(save(tmp_path, make()))


@pytest.mark.parametrize("reverse", [False, True])
def test_nodes_in_a_chain_are_read_in_linear_time(tmp_path, reverse):
    count = 20_000
    names = ["c", *(f"r{number}" for number in range(count - 1)), "y"]
    nodes = [CONV, *(helper.make_node("Relu", [one], [two]) for one, two in pairwise(names))]
    path = save(tmp_path, make_graph(nodes[::-1] if reverse else nodes, [WEIGHT]))
    began = time.process_time()
    graph = read_graph(path)
    assert time.process_time() - began < CHAIN_SECONDS
    assert len(onnx.load_from_string(graph.document).graph.node) == count + 1


def test_a_function_that_is_called_often_is_inlined_in_linear_time(tmp_path):
    count = 10_000
    names = ["c", *(f"r{number}" for number in range(count - 1)), "y"]
    body = [helper.make_node("Relu", ["a"], ["t"]), helper.make_node("Neg", ["t"], ["b"])]
    function = helper.make_function("d", "F", ["a"], ["b"], body, [helper.make_opsetid("", 18)])
    calls = [helper.make_node("F", [one], [two], domain="d") for one, two in pairwise(names)]
    path = save(tmp_path, make_graph([CONV, *calls], [WEIGHT], functions=[function]))
    began = time.process_time()
    read_graph(path)
    assert time.process_time() - began < 2 * CHAIN_SECONDS
