"""Programs of torch.export from others: nothing that a file says becomes code; sizes are bounded before any work."""

from __future__ import annotations

import copy
import io
import json
import pickle
import re
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemel.models.errors import InputError
from gemel.models.graph import program_archive, program_operators, program_schema
from gemel.models.graph.onnx_reader import read_graph
from gemel.models.graph.program import convert_program, copy_program
from gemel.models.graph.program_fields import ProgramFault
from gemel.models.graph.program_schema import rebuild_program
from gemel.models.graph.program_sizes import SizeParser
from tests.hostile.codecs import Bomb

MARK = "was-run"
CODES = (
    'x=__import__("os").mkdir("was-run")',
    'x") if __import__("os").mkdir("was-run") else getattr(self, "x',
    "x\n    __import__('os').mkdir('was-run')\n#",
    "__import__('os').mkdir('was-run')",
    "x); __import__('os').mkdir('was-run'); (x",
)
CHARACTERS = [chr(code) for code in range(1, 128)]
Edit = Callable[[Any], Any]


class Net(nn.Module):
    """A network with a name of every kind: parameters, buffers, a constant, a text, sizes of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.register_buffer("scale", torch.rand(4, 1, 1))
        self.register_buffer("shift", torch.rand(4, 1, 1), persistent=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = nn.functional.gelu(self.conv(x) * self.scale + self.shift, approximate="tanh")
        z = y.reshape(y.shape[0] * 2, -1) * torch.tensor([2.0])
        return {"scores": y.mean((2, 3)), "half": z.reshape(y.shape[0], -1)[:, :4]}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "model.pt2"
    batch = ({0: torch.export.Dim("b", min=1, max=64)},)
    exported = torch.export.export(Net().eval(), (torch.zeros(2, 3, 8, 8),), dynamic_shapes=batch)
    torch.export.save(exported, path)
    return path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Code of these files would make a folder here."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rewrite(
    program: Path, target: Path, edit: Edit | None = None, more: dict[str, bytes] | None = None,
    lists: Edit | None = None, rename: Callable[[str], str] = str, kind: int = zipfile.ZIP_STORED,
) -> Path:  # fmt: skip
    """The archive with its program changed by `edit`, its lists of weights by `lists`, and more members."""
    with zipfile.ZipFile(program) as source, zipfile.ZipFile(target, "w", kind) as written:
        root = source.namelist()[0].split("/")[0]
        for name in source.namelist():
            data = source.read(name)
            change = edit if name.endswith("models/model.json") else lists if name.endswith("_config.json") else None
            if change is not None:
                tree = json.loads(data)
                changed = change(tree)
                data = json.dumps(tree if changed is None else changed).encode()
            written.writestr(zipfile.ZipInfo(rename(name)), data)
        for name, data in (more or {}).items():
            written.writestr(zipfile.ZipInfo(name if name.startswith("/") else f"{root}/{name}"), data)
    return target


def replace_text(tree: Any, old: str, new: str) -> Any:
    """The tree with one text in place of another, keys and parts of sizes too."""
    if isinstance(tree, dict):
        return {replace_text(key, old, new): replace_text(value, old, new) for key, value in tree.items()}
    if isinstance(tree, list):
        return [replace_text(value, old, new) for value in tree]
    return new if tree == old else tree


def graph_of(tree: Any) -> Any:
    return tree["graph_module"]["graph"]


def put(tree: Any, key: str, value: Any) -> None:
    """Put a value at every occurrence of a key."""
    for inner in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(inner, dict | list):
            put(inner, key, value)
    if isinstance(tree, dict) and key in tree:
        tree[key] = value


def put_metadata(tree: Any, text: str) -> None:
    for node in graph_of(tree)["nodes"]:
        node["metadata"] = {
            "nn_module_stack": f"{text},{text},{text}", "stack_trace": text, "torch_fn": text,
            "source_fn_stack": f"{text},{text}", "custom": json.dumps({text: text}), "from_node": json.dumps([{}]),
        }  # fmt: skip


def put_nodes(tree: Any, text: str) -> None:
    for number, node in enumerate(graph_of(tree)["nodes"]):
        node["name"] = f"{text}{number}"


def put_calls(tree: Any, text: str) -> None:
    calls = tree["graph_module"]["module_call_graph"]
    calls[1:] = [{"fqn": text, "signature": None}]
    put(calls, "forward_arg_names", [text])
    put(calls, "in_spec", text)
    put(calls, "out_spec", text)


def put_unknown(tree: Any, text: str) -> None:
    for part in (tree, tree["graph_module"], graph_of(tree), graph_of(tree)["nodes"][0]):
        part[text] = text


def first_argument(tree: Any, kind: str) -> Any:
    arguments = (argument for node in graph_of(tree)["nodes"] for argument in node["inputs"])
    return next(argument for argument in arguments if kind in argument["arg"])


READ: dict[str, Callable[[Any, str], Any]] = {
    "input": lambda tree, text: replace_text(tree, "x", text),
    "value": lambda tree, text: replace_text(tree, "conv2d", text),
    "parameter": lambda tree, text: replace_text(tree, "conv.weight", text),
    "parameter's value": lambda tree, text: replace_text(tree, "p_conv_weight", text),
    "buffer": lambda tree, text: replace_text(tree, "scale", text),
    "buffer of no state": lambda tree, text: replace_text(tree, "shift", text),
    "constant": lambda tree, text: replace_text(tree, "lifted_tensor_0", text),
    "output": lambda tree, text: replace_text(tree, "mean", text),
    "node": put_nodes,
    "metadata": put_metadata,
    "module calls": put_calls,
    "guards": lambda tree, text: tree.update(guards_code=[text]),
    "custom metadata": lambda tree, text: tree["graph_module"].update(metadata={"custom": json.dumps({text: text})}),
    "named tuples": lambda tree, text: tree["graph_module"].update(
        treespec_namedtuple_fields={text: {"field_names": [text]}}),
    "version": lambda tree, text: tree.update(torch_version=text),
    "namespace": lambda tree, text: tree["opset_version"].update({text: 1}),
    "other symbol": lambda tree, text: tree["range_constraints"].update({text: {"min_val": 1, "max_val": 2}}),
    "custom object": lambda tree, text: graph_of(tree).update(
        custom_obj_values={text: {"name": text, "class_fqn": text}}),
    "size of a value": lambda tree, text: graph_of(tree)["tensor_values"]["conv2d"].update(
        sizes=[{"as_expr": {"expr_str": text}}]),
    "device": lambda tree, text: put(tree, "device", {"type": text, "index": None}),
    "unknown fields": put_unknown,
}  # fmt: skip
"""Names of a program that is read, whatever they are."""
REFUSED: dict[str, Callable[[Any, str], Any]] = {
    "operator": lambda tree, text: graph_of(tree)["nodes"][0].update(target=text),
    "operator of a library": lambda tree, text: graph_of(tree)["nodes"][0].update(target=f"torch.ops.aten.{text}"),
    "argument": lambda tree, text: first_argument(tree, "as_tensor").update(name=text),
    "text": lambda tree, text: first_argument(tree, "as_string").update(arg={"as_string": text}),
    "size of an input": lambda tree, text: put(graph_of(tree)["tensor_values"]["x"], "expr_str", text),
    "kind of an argument": lambda tree, text: first_argument(tree, "as_tensor").update(arg={text: text}),
    "kind of an input": lambda tree, text: tree["graph_module"]["signature"]["input_specs"].append({text: text}),
    "verifier": lambda tree, text: tree.update(verifiers=[text]),
    "dialect of operators": lambda tree, text: tree["opset_version"].update(aten=text),
    "what nothing makes": lambda tree, text: first_argument(tree, "as_tensor").update(
        arg={"as_tensor": {"name": text}}),
}  # fmt: skip
"""Names of which only those that are listed are read."""


def texts_of(tree: Any) -> set[str]:
    """Every text of a tree, keys too."""
    if isinstance(tree, dict):
        return {*tree, *(text for value in tree.values() for text in texts_of(value))}
    if isinstance(tree, list):
        return {text for value in tree for text in texts_of(value)}
    return {tree} if isinstance(tree, str) else set()


def texts_of_copy(path: Path) -> set[str]:
    """Every text that torch is given of a program: the names of members, and what is in those that are JSON."""
    _, copy = copy_program(path)
    with zipfile.ZipFile(copy) as archive:
        documents = [json.loads(archive.read(name)) for name in archive.namelist() if name.endswith(".json")]
        return {*archive.namelist(), *(text for document in documents for text in texts_of(document))}


def test_program_of_the_sample_is_read_with_its_names(program: Path) -> None:
    graph = read_graph(program)
    assert set(graph.state) == {"conv.weight", "conv.bias", "scale", "shift"}
    assert graph.input.name == "x" and graph.input.shape == ("batch", 3, 8, 8)
    assert [output.shape for output in graph.outputs] == [("batch", 4), ("batch", 4)]


def test_code_in_the_name_of_an_input_is_not_run(program: Path, tmp_path: Path) -> None:
    path = rewrite(program, tmp_path / "evil.pt2", lambda tree: replace_text(tree, "x", CODES[0]))
    assert read_graph(path).input.name != "x"
    assert not Path(MARK).exists()


@pytest.mark.parametrize("code", [*CODES, "".join(CHARACTERS)])
def test_code_in_every_name_is_read_and_not_run(program: Path, tmp_path: Path, code: str) -> None:
    def edit(tree: Any) -> Any:
        for number, change in reversed([*enumerate(READ.values())]):  # values are renamed last
            tree = change_tree(tree, change, f"{code}{number}")
        return tree

    def edit_lists(tree: Any) -> Any:
        for number, kind in enumerate(READ):
            tree = _rename(kind, f"{code}{number}")(tree)
        return tree

    state = read_graph(rewrite(program, tmp_path / "evil.pt2", edit, lists=edit_lists)).state
    assert len(state) == 4 and all(re.fullmatch(r"[\w.]+", key, re.ASCII) for key in state), set(state)
    assert not Path(MARK).exists()


def _rename(kind: str, text: str) -> Edit:
    """The same name in the lists of weights."""
    names = {
        "parameter": "conv.weight",
        "buffer": "scale",
        "buffer of no state": "shift",
        "constant": "lifted_tensor_0",
    }
    return lambda tree: replace_text(tree, names.get(kind, ""), text)


@pytest.fixture(scope="module")
def tree(program: Path) -> Any:
    """The JSON of the program; not to be changed."""
    with zipfile.ZipFile(program) as archive:
        return json.loads(archive.read(next(name for name in archive.namelist() if name.endswith("models/model.json"))))


def change_tree(tree: Any, change: Callable[[Any, str], Any], text: str) -> Any:
    copied = copy.deepcopy(tree)
    changed = change(copied, text)
    return copied if changed is None else changed


@pytest.mark.parametrize("kind", READ)
def test_no_character_of_a_name_reaches_torch(tree: Any, kind: str) -> None:
    plain = texts_of(rebuild_program(tree).tree)
    for text in [*(f"a{character}b" for character in CHARACTERS), "".join(CHARACTERS), *CODES, "", "é\u202e"]:
        document = rebuild_program(change_tree(tree, READ[kind], text))
        assert texts_of(document.tree) == plain, repr(text)
        assert all(re.fullmatch(r"w\d+", weight.name) for weight in document.weights), repr(text)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_text_that_is_not_listed_is_refused(tree: Any, kind: str) -> None:
    for text in [*(f"a{character}b" for character in CHARACTERS), *CODES]:
        with pytest.raises(ProgramFault) as refused:
            rebuild_program(change_tree(tree, REFUSED[kind], text))
        assert str(refused.value).isprintable()


# Members of the archive


def _pickle_samples() -> bytes:
    return pickle.dumps(Bomb())


def _save_samples() -> bytes:
    buffer = io.BytesIO()
    torch.save(((Bomb(),), {}), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("make", [_pickle_samples, _save_samples, lambda: b"", lambda: b"\x80\x04" + b"(" * 10**6])
def test_samples_are_not_opened(program: Path, tmp_path: Path, make: Callable[[], bytes]) -> None:
    target = tmp_path / "model.pt2"
    with zipfile.ZipFile(program) as source, zipfile.ZipFile(target, "w") as written:
        for name in source.namelist():
            written.writestr(name, make() if "sample_inputs" in name else source.read(name))
    _, copied = copy_program(target)
    assert zipfile.ZipFile(copied).read("model/data/sample_inputs/model.pt") == b""
    assert texts_of_copy(target) == texts_of_copy(program)
    assert not Path(MARK).exists()


@pytest.mark.parametrize("name", [
    "data/constants/custom_obj_0", "data/constants/opaque_obj_0", "data/aotinductor/model/a.so",
    "data/weights/model.pt", "extra/../../was-run", "/was-run", "../was-run", "data/weights/weight_9",
    "serialized_state_dict.pt", "x\\y", "é",
])  # fmt: skip
def test_other_members_are_not_opened(program: Path, tmp_path: Path, name: str) -> None:
    path = rewrite(program, tmp_path / "evil.pt2", more={name: _pickle_samples()})
    assert texts_of_copy(path) == texts_of_copy(program)
    assert not Path(MARK).exists() and not (tmp_path.parent / MARK).exists()


@pytest.mark.parametrize("root", ["".join(CHARACTERS).replace("/", ""), *CODES[:2], "..", " "])
def test_name_of_the_archive_is_not_passed_on(program: Path, tmp_path: Path, root: str) -> None:
    path = rewrite(program, tmp_path / "evil.pt2", rename=lambda name: f"{root}/{name.partition('/')[2]}")
    assert texts_of_copy(path) == texts_of_copy(program)


def _first_payload(tree: Any, **changes: Any) -> None:
    next(iter(tree["config"].values())).update(changes)


def _first_meta(tree: Any, **changes: Any) -> None:
    next(iter(tree["config"].values()))["tensor_meta"].update(changes)


PAYLOADS: dict[str, Callable[[Any], Any]] = {
    "pickled": lambda tree: _first_payload(tree, use_pickle=True),
    "elsewhere": lambda tree: _first_payload(tree, path_name="../../../../etc/passwd"),
    "in a custom object": lambda tree: _first_payload(tree, path_name="custom_obj_0"),
    "without a description": lambda tree: _first_payload(tree, tensor_meta=None),
    "larger than the file": lambda tree: _first_meta(tree, sizes=[{"as_int": 10**6}], strides=[{"as_int": 1}]),
    "repeated 1e12 times": lambda tree: _first_meta(tree, sizes=[{"as_int": 10**12}], strides=[{"as_int": 0}]),
    "of 2^62 x 2^62": lambda tree: _first_meta(tree, sizes=[{"as_int": 2**62}] * 2, strides=[{"as_int": 0}] * 2),
    "before the file": lambda tree: _first_meta(tree, storage_offset={"as_int": -1}),
    "beyond the file": lambda tree: _first_meta(tree, storage_offset={"as_int": 2**40}),
    "backwards": lambda tree: _first_meta(tree, strides=[{"as_int": -1}] * 4),
    "of symbols": lambda tree: _first_meta(tree, sizes=[{"as_expr": {"expr_str": "9**99**99"}}]),
    "of no dtype": lambda tree: _first_meta(tree, dtype="os.system"),
    "missing": lambda tree: {"config": {}},
}


@pytest.mark.parametrize("kind", PAYLOADS)
def test_weight_that_is_not_plain_bytes_is_refused(program: Path, tmp_path: Path, kind: str) -> None:
    with pytest.raises(InputError, match=r"weight|size|integer|tensor_meta"):
        copy_program(rewrite(program, tmp_path / "evil.pt2", lists=PAYLOADS[kind]))


def test_parts_of_one_name_are_refused(program: Path, tmp_path: Path) -> None:
    path = tmp_path / "evil.pt2"
    with pytest.warns(UserWarning, match="Duplicate"):
        rewrite(program, path, more={"models/model.json": b"{}"})
    with pytest.raises(InputError, match="two parts of one name"):
        copy_program(path)


def test_second_program_is_refused(program: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="second program"):
        copy_program(rewrite(program, tmp_path / "evil.pt2", more={"models/evil.json": b"{}"}))


def test_compressed_archive_is_refused(program: Path, tmp_path: Path) -> None:
    path = tmp_path / "evil.pt2"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as written:
        written.writestr("model/models/model.json", bytes(10**8))
    with pytest.raises(InputError, match="compressed"):
        copy_program(path)


@pytest.mark.parametrize(
    "parts", [{"x": b""}, {"model/x": b""}, {"model/models/": b""}, {"models/model.json": b"{}"}, {}]
)
def test_archive_of_no_program_is_refused(tmp_path: Path, parts: dict[str, bytes]) -> None:
    path = tmp_path / "evil.pt2"
    with zipfile.ZipFile(path, "w") as written:
        for name, data in parts.items():
            written.writestr(name, data)
    with pytest.raises(InputError, match="is no program"):
        copy_program(path)


@pytest.mark.parametrize("data", [b"", b"text", b"PK\5\6", b"PK\5\6" + b"\xff" * 18, b"PK\3\4" * 1000])
def test_file_that_is_no_archive_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "evil.pt2"
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"no \.pt2 file|list of parts"):
        copy_program(path)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b"1", b"{" * 10**5, b'{"graph_module": 1}', b"\xff\xfe", b"9" * 10**5]
)
def test_json_of_no_program_is_refused(program: Path, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "evil.pt2"
    with zipfile.ZipFile(path, "w") as written:
        written.writestr("model/models/model.json", data)
    with pytest.raises(InputError, match=r"its program|its models/model.json"):
        copy_program(path)


def test_long_list_of_parts_is_refused_before_it_is_read(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_archive, "MAX_DIRECTORY_BYTES", 100)
    with pytest.raises(InputError, match="list of parts"):
        copy_program(program)


@pytest.mark.parametrize("share", [0, 0.3, 0.6, 0.9, 0.999])
def test_broken_off_archive_is_refused(program: Path, tmp_path: Path, share: float) -> None:
    path = tmp_path / "evil.pt2"
    path.write_bytes(program.read_bytes()[: int(program.stat().st_size * share)])
    with pytest.raises(InputError, match=r"no \.pt2 file|no program"):
        copy_program(path)


# Work

SIZES = (
    "9**99**99", "s0*9**9**9**9", "9**(9*99999999)", "s0**2", "s0/2", "s0 % 2", "~s0", "s0 if s0 else 1", "s0.real",
    "s0()", "Pow(Integer(9), Integer(99999999999))", "Symbol('x', integer=True)", "Symbol(*'s0')", "Max(s0, 2)",
    "lambda: 1", "[s0]", "s0 and 1", "s0 < 2", "'s0'", "1.5", "1e9", "True", str(2**63), "9" * 5000, "u0", "x",
    "(" * 300 + "s0" + ")" * 300, "-" * 399 + "1", "*".join(["9"] * 3000), "s0" + "+s0" * 1000, "s0\n+1", "s0#", "",
    "FloorDiv(s0)", "FloorDiv(1, 2, 3)", "Add(s0)", "Mul(s0, evaluate=s0)", "Integer(s0, s0)", "__import__('os')",
)  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size[:20])
def test_size_that_is_no_sum_or_product_is_refused_at_once(program: Path, tmp_path: Path, size: str) -> None:
    edit = REFUSED["size of an input"]
    path = rewrite(program, tmp_path / "evil.pt2", lambda tree: edit(tree, size))
    start_s = time.process_time()
    with pytest.raises(InputError):
        copy_program(path)
    assert time.process_time() - start_s < 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("s7", 5), ("2*s7 + 1", 11), ("(s7 - 1)//2*3", 6), ("-s7", -5),
        ("Symbol('s7', positive=True, integer=True)", 5),
        ("Mul(Integer(2), Symbol('s7'), Add(Symbol('s7'), Integer(-1)))", 40),
        ("FloorDiv(Symbol('s7'), Integer(2))", 2),
    ],
)  # fmt: skip
def test_size_of_sums_and_products_means_what_it_meant(text: str, value: int) -> None:
    written = SizeParser().rewrite(text)
    names = {"Symbol": lambda name, **_: 5, "FloorDiv": lambda one, two: one // two}
    assert eval(written, {"__builtins__": {}}, names) == value


def test_sizes_of_values_are_not_read(program: Path, tmp_path: Path) -> None:
    def edit(tree: Any) -> None:
        values = graph_of(tree)["tensor_values"]
        for name in values.keys() - {"x"}:
            put(values[name], "expr_str", "9**99**99")

    assert len(read_graph(rewrite(program, tmp_path / "evil.pt2", edit)).state) == 4


@pytest.mark.parametrize("target", [
    "os.system", "torch.hub.load", "_operator.attrgetter", "_operator.methodcaller", "_operator.lshift",
    "builtins.eval",
    "torch.ops.aten.from_file.default", "torch.ops.aten.save.default", "torch.ops.aten.warn.default",
    "torch.ops.aten.__class__.default", "torch.ops.aten.relu.__class__", "torch.ops.higher_order.cond.default",
    "torch.ops.load_library", "torch.ops.aten.relu", "#x:y", "math.factorial", "torch.sym_fresh_size",
    "torch.ops.aten.mul.int", "torch.ops.aten.format.default", "torch.ops.aten.relu.default\n",
])  # fmt: skip
def test_function_that_is_no_plain_operator_is_refused(target: str) -> None:
    with pytest.raises(ProgramFault, match="calls"):
        program_operators.find_operator(target)


def test_too_many_nodes_are_refused(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_schema, "MAX_NODES", len(graph_of(tree)["nodes"]) - 1)
    with pytest.raises(ProgramFault, match="nodes, and up to"):
        rebuild_program(tree)


@pytest.mark.parametrize(
    ("target", "operand"), [("_operator.mul", None), ("_operator.pow", 99_999_999), ("_operator.pow", None)]
)
def test_sizes_that_grow_without_end_are_refused_at_once(
    program: Path, tmp_path: Path, target: str, operand: int | None
) -> None:
    def edit(tree: Any) -> None:
        graph = graph_of(tree)
        size = next(node for node in graph["nodes"] if "as_sym_int" in node["outputs"][0])
        last = size["outputs"][0]["as_sym_int"]["as_name"]
        for number in range(60):
            name = f"grown{number}"
            arguments = [{"as_name": last}, {"as_name": last} if operand is None else {"as_int": operand}]
            graph["nodes"].append({
                "target": target, "outputs": [{"as_sym_int": {"as_name": name}}], "metadata": {},
                "inputs": [{"name": "", "arg": {"as_sym_int": one}, "kind": 1} for one in arguments],
            })  # fmt: skip
            last = name

    path = rewrite(program, tmp_path / "evil.pt2", edit)
    with pytest.raises(InputError, match=r"size that no tensor has|no integer"):
        copy_program(path)


def test_huge_constant_is_refused_before_it_is_computed(tmp_path: Path) -> None:
    class Range(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean((2, 3)) + torch.arange(10**4).sum()

    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(Range(), (torch.zeros(1, 3, 8, 8),)), path)

    def edit(tree: Any) -> None:
        put(tree, "as_int", 10**12)

    with pytest.raises(InputError, match="computes a tensor of 1000000000000 values"):
        convert_program(rewrite(path, tmp_path / "evil.pt2", edit_ranges(edit)))


def edit_ranges(edit: Callable[[Any], None]) -> Edit:
    """Change the arguments of the ranges that a program makes."""

    def change(tree: Any) -> None:
        for node in graph_of(tree)["nodes"]:
            if "arange" in node["target"]:
                edit(node["inputs"])

    return change
