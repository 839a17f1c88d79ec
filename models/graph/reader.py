"""Reads an ONNX file as data: its graph, its weights from the file and from beside it, and what it takes."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common.inliner import InlinePass
from onnx_ir.tensor_adapters import from_torch_dtype
from torch import Tensor

from models.errors import InputError, join_names, message_of, size_text
from models.graph.cut import cut_end, remove_unused
from models.graph.document import (
    BUFFER,
    HINT,
    MAX_FILE_BYTES,
    MAX_TENSOR_BYTES,
    Cut,
    Graph,
    TensorInfo,
    describe_node,
    parse_model,
    to_torch,
)  # fmt: skip
from models.graph.fold import BatchError, Folded, fold_graph
from models.graph.names import write_weights
from models.graph.upgrade import OPSET, upgrade_opset
from models.io import read_bounded

MAX_SIDE = 16384
"""Pixels of an input's side."""
BATCH = "batch"
INTEGER = "uint8"
Size = tuple[int, int]


def load_graph(path: str | Path, size: Size | None = None) -> Graph:
    """Read an .onnx or .pt2 file as data; `size` is the picture's (H, W) where the file leaves it open.

    Raises InputError, one line with the operator and what to do, for a file that is damaged or cannot be taken.
    """
    path = Path(path)
    if path.suffix == ".pt2":
        from models.graph.program import convert_program

        return read_onnx(partial(convert_program, path), path, size)
    return read_onnx(partial(read_bounded, path, MAX_FILE_BYTES, HINT), path, size)


def read_onnx(read: Callable[[], bytes], path: Path, size: Size | None = None) -> Graph:
    """The graph of an ONNX file whose bytes `read` returns; external data is beside `path`."""
    try:
        model = parse_model(read(), str(path))
        found = _read_model(model, path, size)
        for value in model.graph.initializers.values():  # a graph refers to itself, and is freed late
            value.const_value = None
        return found
    except InputError:
        raise
    except Exception as error:  # a malformed graph fails anywhere, with any kind
        raise InputError(path, f"its graph is malformed: {message_of(error)}", HINT) from error


def _read_model(model: ir.Model, path: Path, size: Size | None) -> Graph:
    where = str(path)
    model = inline_functions(model, where)
    graph = model.graph
    if max(graph.opset_imports.get(domain, 0) for domain in ("", "ai.onnx")) < OPSET:
        upgrade_opset(graph)
    constants = take_constants(graph, path)
    try:
        graph.sort()
    except ValueError as error:
        raise InputError(where, "its graph has a cycle", HINT) from error
    remove_unused(graph)
    check_values(graph, where)
    cut = cut_end(graph, where)
    remove_unused(graph)
    shape, is_last = input_shape(graph, dict(model.metadata_props), size, where)
    is_whole = take_floats(graph)
    graph, folded = fold_freely(graph, constants, shape, where)
    remove_unused(graph)
    if not list(graph):
        raise InputError(where, "no output depends on the picture", HINT)
    state = write_weights(graph, folded)
    check_finite(graph, state, where)
    made = finish(model, graph, folded, state, cut, where)
    if not is_last and not is_whole:
        return made
    batch, channels, *sides = made.input.shape
    sizes = (batch, *sides, channels) if is_last else made.input.shape
    return replace(made, given=TensorInfo(made.input.name, INTEGER if is_whole else made.input.dtype, sizes))


def take_floats(graph: ir.Graph) -> bool:
    """Let a graph that takes integers 0..255 take floats of these values; whether it did."""
    picture = next(value for value in graph.inputs)
    is_whole = picture.dtype == ir.DataType.UINT8
    if is_whole:
        picture.type = ir.TensorType(ir.DataType.FLOAT)
    return is_whole


def check_values(graph: ir.Graph, where: str) -> None:
    """Refuse a node that reads what no node, input or weight of the graph makes."""
    for node in graph:
        for value in node.inputs:
            if value is not None and not (value.producer() or value.is_graph_input() or value.is_initializer()):
                raise InputError(where, f"{describe_node(node)} reads '{value.name}', which nothing makes", HINT)


def check_finite(graph: ir.Graph, state: dict[str, Tensor], where: str) -> None:
    """Refuse weights that are NaN or infinite; a constant may be infinite, as the mask of an attention is."""
    for name, tensor in state.items():
        placeholder = graph.initializers[name].const_value if name in graph.initializers else None
        is_fixed = placeholder is not None and placeholder.doc_string == BUFFER
        if bool((tensor.isnan() if is_fixed else ~tensor.isfinite()).any()):
            kind = "NaN" if bool(tensor.isnan().any()) else "infinite values"
            hint = "train or export it again; in float32 where half precision overflowed"
            raise InputError(where, f"the weight '{name}' holds {kind}", hint)


def inline_functions(model: ir.Model, where: str) -> ir.Model:
    """The model with the body of each function in its places."""
    if not model.functions:
        return model
    try:
        return InlinePass()(model).model
    except Exception as error:  # onnx-ir's passes raise many kinds for a malformed function
        raise InputError(where, f"its functions cannot be inlined: {error}", HINT) from error


def fold_freely(
    graph: ir.Graph, constants: dict[str | None, Tensor], shape: list[int | None], where: str
) -> tuple[ir.Graph, Folded]:
    """Fold with a free batch where the graph permits one, else with its own."""
    batch = shape[0] or 1
    sizes = [batch, *(int(one or 0) for one in shape[1:])]
    for free in ("fixed",) if shape[0] else ("dynamic", "fixed"):
        copy = graph.clone()
        try:
            return copy, fold_graph(copy, _by_value(copy, constants), sizes, free, where)
        except (BatchError, InputError):
            continue
    folded = fold_graph(graph, _by_value(graph, constants), sizes, "no", where)
    if batch != 1:
        raise InputError(where, f"its batch is fixed to {batch}", "export it with a dynamic batch, or with batch 1")
    return graph, folded


def _by_value(graph: ir.Graph, constants: dict[str | None, Tensor]) -> dict[ir.Value, Tensor]:
    return {value: constants[value.name] for value in graph.initializers.values()}


# The input


def input_shape(
    graph: ir.Graph, metadata: dict[str, str], size: Size | None, where: str
) -> tuple[list[int | None], bool]:
    """The sizes of the input, None for a batch that is free; and whether the file has its channels last."""
    inputs = [value for value in graph.inputs if not value.is_initializer()]
    used = [value for value in inputs if list(value.uses())]
    if len(used) > 1:
        names = join_names([f"'{value.name}'" for value in used])
        raise InputError(where, f"takes {len(used)} inputs ({names})", "export a model that takes the picture alone")
    if not used:
        raise InputError(where, "takes no input that it uses", HINT)
    picture = used[0]
    for value in inputs:
        if value is not picture:
            graph.inputs.remove(value)
    for value in [value for value in graph.inputs if value.is_initializer()]:
        graph.inputs.remove(value)
    if picture.shape is None or len(picture.shape) != 4:
        rank = "no shape" if picture.shape is None else f"{len(picture.shape)} axes"
        raise InputError(where, f"its input '{picture.name}' has {rank}, not a picture's four", HINT)
    dims = [one if isinstance(one, int) and one > 0 else None for one in picture.shape]
    is_last = dims[1] not in (1, 3, 4) and dims[3] in (1, 3, 4)
    if is_last:
        dims = transpose_input(graph, picture, dims)
    fixed = (dims[2], dims[3])
    height, width = (one or two for one, two in zip(fixed, size or _said_size(metadata) or (None, None)))
    if height is None or width is None:
        raise InputError(where, "leaves the size of its input open", "name it: input_size: [H, W]")
    if size is not None and any(one and one != two for one, two in zip(fixed, size)):
        raise InputError(
            where, f"has a fixed input of {fixed[0]} x {fixed[1]}, and {size[0]} x {size[1]} is asked for",
            "leave input_size out, or export it with that size",
        )  # fmt: skip
    channels = dims[1] or 3
    if channels != 3:
        raise InputError(where, f"takes pictures of {channels} channels", "export a model that takes three, RGB or BGR")
    if max(height, width, dims[0] or 1) > MAX_SIDE:
        raise InputError(where, f"its input is {height} x {width}", f"sides of up to {MAX_SIDE} are read")
    return [dims[0], channels, height, width], is_last


def transpose_input(graph: ir.Graph, picture: ir.Value, dims: list[int | None]) -> list[int | None]:
    """Let the graph take (N, 3, H, W) where it takes (N, H, W, 3); the sizes that it then takes."""
    node = ir.node("Transpose", [picture], {"perm": [0, 2, 3, 1]}, name="channels_last")
    picture.replace_all_uses_with(node.outputs[0])
    graph.insert_before(graph[0], node)
    node.replace_input_with(0, picture)
    return [dims[0], dims[3], dims[1], dims[2]]


def _said_size(metadata: dict[str, str]) -> Size | None:
    """The input's size in the metadata of an Ultralytics file."""
    try:
        found = json.loads(metadata.get("imgsz", ""))
    except (json.JSONDecodeError, RecursionError):
        return None
    found = [found, found] if isinstance(found, int) else found
    if isinstance(found, list) and len(found) == 2 and all(isinstance(one, int) and one > 0 for one in found):
        return found[0], found[1]
    return None


# Weights


def take_constants(graph: ir.Graph, path: Path) -> dict[str | None, Tensor]:
    """The weights of a graph by name, those of Constant nodes too; none refers to the parsed file from then on."""
    for node in graph.all_nodes():
        for name, attribute in node.attributes.items():
            if attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype != ir.DataType.STRING:
                array = to_torch(attribute.value.numpy()).numpy()
                node.attributes[name] = ir.AttrTensor(name, ir.Tensor(array, name=name))
    constants: dict[str | None, Tensor] = {}
    for value in graph.initializers.values():
        tensor = constants[value.name] = read_tensor(value, path)
        value.const_value = ir.Tensor(tensor.numpy(), name=value.name)
    return constants


def read_tensor(value: ir.Value, path: Path) -> Tensor:
    """A weight from the file or from the data beside it."""
    tensor = value.const_value
    name = value.name or ""
    if tensor is None:
        raise InputError(path, f"the weight '{name}' has no values", HINT)
    shape = tensor.shape.numpy()
    count = math.prod(shape)
    if any(one < 0 for one in shape) or count > MAX_TENSOR_BYTES:
        raise InputError(path, f"the weight '{name}' has an impossible shape", HINT)
    if isinstance(tensor, ir.ExternalTensor):
        return to_torch(read_external(tensor, name, path))
    try:
        return to_torch(tensor.numpy())
    except (ValueError, TypeError) as error:
        raise InputError(path, f"the weight '{name}' is damaged: {error}", HINT) from error


def read_external(tensor: ir.ExternalTensor, name: str, path: Path) -> np.ndarray:
    """A weight's values from a file in the folder of the model."""
    file, hint = beside(path, str(tensor.location), name), "keep the data files beside the model, as it was exported"
    nbytes, offset = int(tensor.nbytes), tensor.offset or 0
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(file, f"the data of '{name}' cannot be read: {error.strerror}", hint) from error
    with open(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InputError(file, f"the data of '{name}' is in no regular file", hint)
        if offset < 0 or tensor.length not in (None, nbytes) or offset + nbytes > status.st_size:
            raise InputError(
                file, f"the data of '{name}' is {size_text(nbytes)} at {offset}, which a file of {status.st_size} "
                "bytes does not hold", hint,
            )  # fmt: skip
        dtype = tensor.dtype.numpy()
        shape = tensor.shape.numpy()
        count = math.prod(shape)
        if dtype.itemsize * count != nbytes:
            raise InputError(file, f"the data of '{name}' has values of less than a byte", HINT)
        return np.fromfile(opened, dtype, count, offset=offset).reshape(shape)


def beside(path: Path, location: str, name: str) -> Path:
    """The path of a data file in a model's folder; InputError for one elsewhere or behind a link."""
    parts = PurePosixPath(location).parts
    if not parts or location.startswith("/") or "\\" in location or ".." in parts or re.match(r"[A-Za-z]:", location):
        raise InputError(path, f"the data of '{name}' is outside the folder of the file", "keep it beside the model")
    file = path.parent
    for part in parts:
        file = file / part
        if file.is_symlink():
            raise InputError(path, f"the data of '{name}' is behind the link {part}", "put the file itself there")
    return file


# The graph


def finish(
    model: ir.Model, graph: ir.Graph, folded: Folded, state: dict[str, Tensor], cut: Cut | None, where: str
) -> Graph:
    """Write the document and describe its input and outputs."""
    described = []
    for value in [*graph.inputs, *graph.outputs]:
        first, second = folded.shapes[value]
        sizes: list[int | str] = [
            size if size == other else _batch_size(size, folded.batch) for size, other in zip(first, second)
        ]
        dtype = from_torch_dtype(folded.dtypes[value])
        value.shape, value.type = (
            ir.Shape([size if isinstance(size, int) else str(size) for size in sizes]),
            ir.TensorType(dtype),
        )
        described.append(TensorInfo(value.name or "", str(folded.dtypes[value]).removeprefix("torch."), tuple(sizes)))
    document = ir.Model(graph, ir_version=min(model.ir_version, 10), producer_name="gemel")
    for domain in list(graph.opset_imports):
        if domain not in ("", "ai.onnx"):
            del graph.opset_imports[domain]
    return Graph(
        ir.to_proto(document).SerializeToString(deterministic=True), state, described[0], tuple(described[1:]),
        dict(model.metadata_props), cut, led=folded.led,
    )  # fmt: skip


def _batch_size(size: int, batch: int) -> str:
    """The name of a size that the batch decides: batch, or 4*batch."""
    return BATCH if size == batch else f"{size // batch}*{BATCH}"
