"""Reads a .pt2 file of torch.export as data, and writes it as ONNX.

`torch.export.load` unpickles sample inputs, some weights and custom objects, evaluates size expressions and loads
compiled code. A file that holds any of it is refused before: only a program of aten operators with plain weights goes
on, in a copy without guards and traces.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from models.errors import InputError, message_of, one_line, size_text
from models.io import ParseError, parse_json
from models.process import quiet

HINT = "save it with torch.export.save(torch.export.export(model.eval(), (picture,)), 'model.pt2'), or export ONNX"
MAX_PROGRAM_BYTES = 2**34
TARGET = re.compile(
    r"torch\.ops\.(aten|torchvision|prims)\.\w+\.\w+|_operator\.\w+|math\.(floor|ceil|trunc|sqrt)|torch\.sym_\w+"
)
SAFE_OPERATORS = {"add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "getitem", "eq", "ne", "lt", "le", "gt",
                  "ge", "pow", "and_", "or_"}  # fmt: skip
SIZE_WORDS = {"Symbol", "positive", "integer", "nonnegative", "True", "False", "Max", "Min", "FloorDiv", "Mod",
              "CeilDiv", "ModularIndexing", "PythonMod", "CleanDiv", "IntTrueDiv", "TruncToInt",
              "Eq", "Ne"}  # fmt: skip
MODEL = "models/model.json"
DROPPED = ("extra/", "data/aotinductor/")


def convert_program(path: Path) -> bytes:
    """The ONNX model of a .pt2 file; InputError for one that is damaged or would need to be unpickled or run."""
    from torch.onnx import export

    safe = copy_program(path)
    try:
        with quiet():
            import torchvision  # noqa: F401  its operators, which a program may call

            program = torch.export.load(safe)
            written = export(program, (), dynamo=True, opset_version=18, verbose=False)
        assert written is not None
        return written.model_proto.SerializeToString()
    except Exception as error:  # torch raises many kinds for a malformed program
        raise InputError(path, f"cannot be read as a program: {message_of(error)}", HINT) from error


def copy_program(path: Path) -> io.BytesIO:
    """The parts of a .pt2 file that are data, as such a file."""
    copy = io.BytesIO()
    try:
        with zipfile.ZipFile(path) as archive, zipfile.ZipFile(copy, "w") as target:
            names = [info.filename for info in archive.infolist()]
            model = next((name for name in names if name.endswith(f"/{MODEL}")), None)
            if model is None:
                raise InputError(path, f"has no {MODEL}: is no program of torch.export", HINT)
            if sum(info.file_size for info in archive.infolist()) > MAX_PROGRAM_BYTES or any(
                info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()
            ):
                raise InputError(path, f"is compressed, or larger than {size_text(MAX_PROGRAM_BYTES)}", HINT)
            root = model.removesuffix(MODEL)
            for name in names:
                inner = name.removeprefix(root)
                check_member(path, inner)
                if inner.startswith(DROPPED):
                    continue
                data = archive.read(name)
                if inner == MODEL:
                    data = json.dumps(clean_program(path, _parse(path, data))).encode()
                elif inner.endswith("_config.json"):
                    check_payloads(path, _parse(path, data))
                elif inner.startswith("data/sample_inputs/"):
                    data = check_samples(path, data)
                target.writestr(zipfile.ZipInfo(name), data)
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, ValueError, RuntimeError) as error:
        raise InputError(path, f"is damaged or is no .pt2 file: {error}", HINT) from error
    copy.seek(0)
    copy.name = path.name
    return copy


def check_member(path: Path, name: str) -> None:
    """Refuse compiled code and what only unpickling reads."""
    if name.startswith("data/aotinductor/"):
        raise InputError(path, "holds compiled code, which runs when it is read", HINT)
    pickled = (name.startswith(("data/weights/", "data/constants/")) and name.endswith(".pt")) or re.match(
        r"data/constants/(custom|opaque)", name
    )
    if pickled or re.fullmatch(r"serialized_.*", name):
        raise InputError(path, f"holds {name}, which would have to be unpickled", HINT)
    if name.startswith("models/") and name != MODEL:
        raise InputError(path, f"holds a second program, {name}", HINT)


def check_payloads(path: Path, config: dict[str, Any]) -> None:
    """Refuse weights that are pickled."""
    for name, payload in config.get("config", {}).items():
        if not isinstance(payload, dict) or payload.get("use_pickle") or payload.get("tensor_meta") is None:
            raise InputError(path, f"its weight '{name}' would have to be unpickled", HINT)
        if not re.fullmatch(r"(weight|tensor)_\d+", str(payload.get("path_name"))):
            raise InputError(path, f"its weight '{name}' is in '{payload.get('path_name')}'", HINT)


def clean_program(path: Path, program: dict[str, Any]) -> dict[str, Any]:
    """A program without traces and guards, every operator and size expression checked."""
    graph = program.get("graph_module", {}).get("graph", {})
    if not isinstance(graph.get("nodes"), list):
        raise InputError(path, "its program has no nodes", HINT)
    program["guards_code"] = []
    for node in graph["nodes"]:
        node["metadata"] = {}
        target = str(node.get("target"))
        last = target.rpartition(".")[2]
        if not TARGET.fullmatch(target) or (target.startswith("_operator") and last not in SAFE_OPERATORS):
            raise InputError(path, f"its program calls {one_line(target)}", "export a model of plain operators")
    for key, value in _walk(program):
        if key == "expr_str" and not _is_size(str(value)):
            raise InputError(path, f"its program computes a size by '{one_line(value)}'", HINT)
        if key in ("as_custom_obj", "as_operator", "as_graph", "as_opaque_value", "custom_obj") and value is not None:
            raise InputError(
                path, f"its program holds objects or branches ({key})", "export a model of plain operators"
            )
        if key in ("in_spec", "out_spec") and value and set(re.findall(r'"type": "([^"]*)"', str(value))) - {
            "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict",
        }:  # fmt: skip
            raise InputError(path, "its program answers with an object", "export a model that returns tensors")
    return program


def _walk(value: Any) -> Iterator[tuple[str, Any]]:
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            yield from one.items()
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)


def _is_size(text: str) -> bool:
    """Whether an expression is sums, products and symbols: sympy evaluates it as Python."""
    words = set(re.findall(r"[A-Za-z_]\w*", text))
    plain = re.fullmatch(r"[\w\s+\-*/(),.=<>']*", text) and not re.search(
        r"\*\*\s*\d{3,}|\.[A-Za-z_]|[A-Za-z_)']\.", text
    )
    return (
        bool(plain)
        and len(text) < 2000
        and all(word in SIZE_WORDS or re.fullmatch(r"[suz]\d+", word) for word in words)
    )


def _parse(path: Path, data: bytes) -> dict[str, Any]:
    try:
        found = parse_json(data, foreign=True)
    except ParseError as error:
        raise InputError(path, f"its program is no JSON: {error}", HINT) from error
    if not isinstance(found, dict):
        raise InputError(path, "its program is no mapping", HINT)
    return found


def check_samples(path: Path, data: bytes) -> bytes:
    """Sample inputs that are tensors, pickled anew: torch would unpickle anything else."""
    try:
        args, kwargs = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        samples = (tuple(args), dict(kwargs))
        if not all(isinstance(one, torch.Tensor) for one in [*samples[0], *samples[1].values()]):
            raise TypeError("inputs that are no tensors")
    except Exception as error:  # torch.load raises many kinds for damaged pickles
        raise InputError(path, "its sample inputs are no tensors, and would have to be unpickled", HINT) from error
    buffer = io.BytesIO()
    torch.save(samples, buffer)
    return buffer.getvalue()
