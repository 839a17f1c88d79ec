"""Reads an ONNX file as data: its graph, its weights from the file and from beside it, and what it takes."""

from __future__ import annotations

import gc
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import from_torch_dtype
from torch import Tensor

from gemel.models.errors import InputError, join_names, message_of, size_text
from gemel.models.files.io import read_bounded
from gemel.models.graph.cut import cut_end, remove_unused
from gemel.models.graph.dequantise import drop_codes
from gemel.models.graph.document import (
    MAX_TENSOR_BYTES,
    describe_node,
    name_ends,
    read_gated,
    text_of,
    write_document,
)
from gemel.models.graph.document_bounds import HINT, MAX_FILE_BYTES
from gemel.models.graph.fold import BatchError, Folded, FoldLimits, fold_graph
from gemel.models.graph.gate import BUFFER, GatedGraph, admit_graph
from gemel.models.graph.names import write_weights
from gemel.models.graph.records import Cut, Graph, TensorInfo
from gemel.models.graph.torch_values import to_torch
from gemel.models.graph.upgrade import upgrade_opset
from gemel.models.graph.work import TooMuchWork, WorkBudget
from gemel.models.notes import add_note

MAX_SIDE = 16384
"""Pixels of an input's side."""
BATCH = "batch"
INTEGER = "uint8"
LUMA = (0.299, 0.587, 0.114)
"""Of R, G and B in a grey picture, as PIL and OpenCV weigh them."""
SQUEEZE_OPSET = 13
"""From which the axes of a Squeeze are an input."""
OTHER_SIDE = 64
"""By which the sides that a file leaves open differ in a second reading."""
SEVERAL = frozenset({"Split", "TopK", "LSTM", "GRU", "RNN", "If", "Loop", "Scan", "Unique"})
"""Operators whose further outputs are computed, or refused with them."""
Size = tuple[int, int]


def load_graph(path: str | Path, size: Size | None = None) -> Graph:
    """Read an .onnx or .pt2 file as data, in a confined child; `size` is the (H, W) where the file leaves it open.

    Raises InputError, one line with the operator and what to do, for a file that is damaged, cannot be taken or takes
    too much.
    """
    from gemel.models.graph.confined_graph import load_confined

    return load_confined(Path(path), size)


def read_graph(path: str | Path, size: Size | None = None) -> Graph:
    """Read an .onnx or .pt2 file in this process, as the child of `load_graph` does."""
    path = Path(path)
    if path.suffix == ".pt2":
        from gemel.models.graph.program import convert_program

        return read_onnx(partial(convert_program, path), path, size)
    return read_onnx(partial(read_bounded, path, MAX_FILE_BYTES, HINT), path, size)


def read_onnx(read: Callable[[], bytes], path: Path, size: Size | None = None) -> Graph:
    """The graph of an ONNX file whose bytes `read` returns; external data is beside `path`."""
    try:
        with _pause_garbage_collection():
            return _read_data(read(), path, size)
    except InputError:
        raise
    except Exception as error:  # a malformed graph fails anywhere, with any kind
        raise InputError(path, f"its graph is malformed: {message_of(error)}", HINT) from error


def _read_data(data: bytes, path: Path, size: Size | None) -> Graph:
    """The graph of a file; its input stays open where the file's is, and the network is the same for other sizes."""
    reading = _Reading(admit_graph(data, path), path, size)
    graph = reading.run()
    # Its sides are fixed, or outputs were reshaped by them.
    if not any(reading.form.is_open) or graph.led:
        return graph
    height, width = (
        int(side) + OTHER_SIDE * is_open
        for side, is_open in zip(graph.input.shape[2:], reading.form.is_open)
    )
    try:
        other = _Reading(admit_graph(data, path), path, (height, width)).run()
    except InputError:
        return graph
    if not _is_same_network(graph, other):
        return graph
    file_input = graph.file_input or graph.input
    sizes = list(file_input.shape)
    first = len(file_input.shape) - (3 if reading.form.is_last else 2)
    for axis, (name, is_open) in enumerate(zip(("height", "width"), reading.form.is_open), first):
        sizes[axis] = name if is_open else sizes[axis]
    return replace(graph, file_input=replace(file_input, shape=tuple(sizes)))


def _is_same_network(graph: Graph, other: Graph) -> bool:
    """Whether two graphs differ in the sizes of their values alone."""

    def describe(document: bytes) -> bytes:
        model = onnx.load_from_string(document)
        del model.graph.value_info[:]
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.ClearField("shape")
        return model.SerializeToString(deterministic=True)

    return (
        describe(graph.document) == describe(other.document)
        and graph.cut == other.cut
        and graph.state.keys() == other.state.keys()
        and all(torch.equal(weight, other.state[name]) for name, weight in graph.state.items())
    )


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Don't look for garbage: a graph is many objects that all live, and looking takes half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class InputForm:
    """What a file takes where the graph takes (N, 3, H, W): channels last, one channel of grey, or no batch.

    `is_open`: any height, any width.
    """

    is_last: bool = False
    channels: int = 3
    has_batch: bool = True
    is_open: tuple[bool, bool] = (False, False)


@dataclass(frozen=True)
class _Prepared:
    """A file's graph up to its end, before anything is computed; `shape` is the picture's, None for a free batch."""

    model: ir.Model
    cut: Cut | None
    shape: list[int | None]
    form: InputForm
    is_whole: bool


class _Reading:
    """Reads one gated file; the weights once, the graph once for each way in which its batch may be free."""

    def __init__(self, gated: GatedGraph, path: Path, size: Size | None) -> None:
        self.gated = gated
        self.path = path
        self.size = size
        self.where = str(path)
        upgrade_opset(gated.model)
        if drop_codes(gated.model):
            note = "is quantised to int8: it is taken as the float network of its weights"
            add_note(path, note, "`gemel merge --weights int8` computes it in integers again")
        self.constants: dict[str | None, Tensor] = {}
        self.form = InputForm()

    def run(self) -> Graph:
        prepared, folded = self.fold_freely()
        self.form = prepared.form
        graph = prepared.model.graph
        where = self.where
        remove_unused(graph)
        if not list(graph):
            raise InputError(where, "no output depends on the picture", HINT)
        state = write_weights(graph, folded)
        check_finite(graph, state, where)
        network = finish(prepared.model, graph, folded, state, prepared.cut)
        for value in graph.initializers.values():  # a graph refers to itself, and is freed late
            value.const_value = None
        batch, _, *sides = network.input.shape
        batch = prepared.shape[0] or batch
        channels = prepared.form.channels
        sizes = (*sides, channels) if prepared.form.is_last else (channels, *sides)
        sizes = (batch, *sizes) if prepared.form.has_batch else sizes
        if sizes == network.input.shape and not prepared.is_whole:
            return network
        file_input = TensorInfo(
            network.input.name, INTEGER if prepared.is_whole else network.input.dtype, sizes
        )
        return replace(network, file_input=file_input)

    def prepare(self) -> _Prepared:
        """The graph with its end cut off."""
        where = self.where
        model = read_gated(self.gated, where)
        graph = model.graph
        self.constants = take_constants(graph, self.path, self.constants)
        try:
            graph.sort()
        except ValueError as error:
            raise InputError(where, "its graph has a cycle", HINT) from error
        remove_unused(graph)
        set_inference(graph, where)
        check_values(graph, where)
        cut = cut_end(graph, where)
        remove_unused(graph)
        shape, form = input_shape(graph, self.gated.metadata, self.size, where)
        return _Prepared(model, cut, shape, form, take_floats(graph))

    def fold_freely(self) -> tuple[_Prepared, Folded]:
        """The graph folded with a free batch where it permits one, else with its own."""
        prepared: _Prepared | None = self.prepare()
        shape = prepared.shape
        sizes = [shape[0] or 1, *(int(size or 0) for size in shape[1:])]
        nbytes = sum(tensor.nbytes for tensor in self.constants.values())
        limits = FoldLimits(WorkBudget(nbytes, self.where), {})
        for free in ("fixed",) if shape[0] else ("dynamic", "fixed"):
            prepared = prepared or self.prepare()
            try:
                return prepared, self.fold(prepared, sizes, free, limits)
            except TooMuchWork:
                raise
            except (BatchError, InputError):
                prepared = None  # half of it is folded
        prepared = self.prepare()
        folded = self.fold(prepared, sizes, "no", limits)
        if sizes[0] != 1:
            hint = "export it with a dynamic batch, or with batch 1"
            raise InputError(self.where, f"its batch is fixed to {sizes[0]}", hint)
        return prepared, folded

    def fold(self, prepared: _Prepared, sizes: list[int], free: str, limits: FoldLimits) -> Folded:
        graph = prepared.model.graph
        constants = {value: self.constants[value.name] for value in graph.initializers.values()}
        return fold_graph(graph, constants, sizes, free, limits)


def set_inference(graph: ir.Graph, where: str) -> None:
    """Let norms and dropouts of a file that was exported in training mode do what they do in use.

    Outputs that nothing reads are dropped; InputError where statistics of the batch are read.
    """
    outputs = set(graph.outputs)
    count = 0
    for node in graph:
        read = [
            place
            for place, value in enumerate(node.outputs)
            if value in outputs or list(value.uses())
        ]
        # Outputs that nothing reads are those of training.
        if len(node.outputs) > 1 and read and node.op_type not in SEVERAL:
            # The first output alone is what the layer gives in use.
            if read[-1] > 0 and node.op_type in ("BatchNormalization", "Dropout"):
                problem = f"{describe_node(node)} was exported in training mode, and its statistics or mask are read"
                raise InputError(where, problem, "export it in eval mode: model.eval()")
            node.resize_outputs(read[-1] + 1)
        mode = node.attributes.pop("training_mode", None)
        count += mode is not None and mode.as_int() == 1
    if count:
        text = (
            f"was exported in training mode; the recorded statistics of its {count} norms are used"
        )
        add_note(where, text, "export it in eval mode: model.eval()")


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
            if value is not None and not (
                value.producer() or value.is_graph_input() or value.is_initializer()
            ):
                raise InputError(
                    where,
                    f"{describe_node(node)} reads '{text_of(value, graph)}', which nothing makes",
                    HINT,
                )


def check_finite(graph: ir.Graph, state: dict[str, Tensor], where: str) -> None:
    """Refuse weights that are NaN or infinite; a constant may be infinite, as the mask of an attention is."""
    for name, tensor in state.items():
        placeholder = graph.initializers[name].const_value if name in graph.initializers else None
        is_fixed = placeholder is not None and placeholder.doc_string == BUFFER
        if bool((tensor.isnan() if is_fixed else ~tensor.isfinite()).any()):
            kind = "NaN" if bool(tensor.isnan().any()) else "infinite values"
            hint = "train or export it again; in float32 where half precision overflowed"
            raise InputError(where, f"the weight '{name}' holds {kind}", hint)


# The input


def input_shape(
    graph: ir.Graph, metadata: dict[str, str], size: Size | None, where: str
) -> tuple[list[int | None], InputForm]:
    """The sizes of the input, None for a batch that is free; and what the file takes in its place."""
    inputs = [value for value in graph.inputs if not value.is_initializer()]
    used = [value for value in inputs if list(value.uses())]
    # Inputs that nothing reads any longer went with the end.
    if len(used) > 1:
        names = join_names([f"'{text_of(value)}'" for value in used])
        raise InputError(
            where,
            f"takes {len(used)} inputs ({names})",
            "export a model that takes the picture alone",
        )
    if not used:
        raise InputError(where, "takes no input that it uses", HINT)
    picture = used[0]
    for value in inputs:
        if value is not picture:
            graph.inputs.remove(value)
    for value in [value for value in graph.inputs if value.is_initializer()]:
        graph.inputs.remove(value)
    if picture.shape is None or len(picture.shape) not in (3, 4):
        rank = "no shape" if picture.shape is None else f"{len(picture.shape)} axes"
        hint = "export a model that takes pictures, (N, C, H, W) or (H, W, C)"
        raise InputError(
            where, f"its input '{text_of(picture)}' has {rank}, not a picture's four", hint
        )
    dims = [size if isinstance(size, int) and size > 0 else None for size in picture.shape]
    has_batch = len(dims) == 4
    if not has_batch:
        drop_batch(graph, picture)
        dims = [1, *dims]
    is_last = dims[1] not in (1, 3, 4) and dims[3] in (1, 3, 4)
    if is_last:
        dims = transpose_input(graph, picture, dims)
    fixed = (dims[2], dims[3])
    height, width = (
        side or two for side, two in zip(fixed, size or _said_size(metadata) or (None, None))
    )
    if height is None or width is None:
        raise InputError(where, "leaves the size of its input open", "name it: input_size: [H, W]")
    if size is not None and any(side and side != two for side, two in zip(fixed, size)):
        raise InputError(
            where,
            f"has a fixed input of {fixed[0]} x {fixed[1]}, and {size[0]} x {size[1]} is asked for",
            "leave input_size out, or export it with that size",
        )
    channels = dims[1] or 3
    if channels not in (1, 3):
        raise InputError(
            where,
            f"takes pictures of {channels} channels",
            "export a model that takes three, or one",
        )
    if channels == 1:
        take_grey(graph, picture)
    if max(height, width, dims[0] or 1) > MAX_SIDE:
        raise InputError(
            where, f"its input is {height} x {width}", f"sides of up to {MAX_SIDE} are read"
        )
    return [dims[0], 3, height, width], InputForm(
        is_last, channels, has_batch, (not fixed[0], not fixed[1])
    )


def put_first(graph: ir.Graph, picture: ir.Value, nodes: list[ir.Node], result: ir.Value) -> None:
    """Let what reads the picture read a result of nodes, which read it."""
    for user, place in list(picture.uses()):
        # The new nodes read the picture itself.
        if user not in nodes:
            user.replace_input_with(place, result)
    graph.insert_before(graph[0], nodes)


def drop_batch(graph: ir.Graph, picture: ir.Value) -> None:
    """Let a graph that takes one picture without a batch take a batch of one."""
    axis = ir.node("Constant", [], {"value": ir.tensor(np.array([0]))}, name="batch_axis")
    options = {"axes": [0]} if graph.opset_imports.get("", 0) < SQUEEZE_OPSET else {}
    inputs = [picture] if options else [picture, axis.outputs[0]]
    node = ir.node("Squeeze", inputs, options, name="without_batch")
    put_first(graph, picture, [node] if options else [axis, node], node.outputs[0])


def take_grey(graph: ir.Graph, picture: ir.Value) -> None:
    """Let a graph that takes one channel take three, R, G and B, of which it sees the luma."""
    nodes: list[ir.Node] = []
    total: ir.Value | None = None
    for place, share in enumerate(LUMA):
        numbers = {"start": np.array([place]), "end": np.array([place + 1]), "axis": np.array([1])}
        bounds = [
            ir.node("Constant", [], {"value": ir.tensor(values)}) for values in numbers.values()
        ]
        part = ir.node("Slice", [picture, *(bound.outputs[0] for bound in bounds)])
        factor = ir.node("Constant", [], {"value": ir.tensor(np.array(share, np.float32))})
        weighted = ir.node("Mul", [part.outputs[0], factor.outputs[0]])
        nodes += [*bounds, part, factor, weighted]
        if total is not None:
            nodes.append(ir.node("Add", [total, weighted.outputs[0]]))
        total = nodes[-1].outputs[0]
    assert total is not None
    put_first(graph, picture, nodes, total)


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
        sides = json.loads(metadata.get("imgsz", ""))
    except (json.JSONDecodeError, RecursionError):
        return None
    sides = [sides, sides] if isinstance(sides, int) else sides
    if (
        isinstance(sides, list)
        and len(sides) == 2
        and all(isinstance(side, int) and side > 0 for side in sides)
    ):
        return sides[0], sides[1]
    return None


# Weights


def take_constants(
    graph: ir.Graph, path: Path, loaded: dict[str | None, Tensor]
) -> dict[str | None, Tensor]:
    """The weights of a graph by name, those that are not `loaded` read; none refers to the parsed file from then on."""
    copies: dict[int, ir.Tensor] = {}
    originals = []  # referred to, so that no other tensor gets its identity
    for node in graph.all_nodes():
        for name, attribute in node.attributes.items():
            tensor = attribute.value
            if attribute.type == ir.AttributeType.TENSOR and tensor.dtype != ir.DataType.STRING:
                if id(tensor) not in copies:  # a function's tensor is that of all its calls
                    originals.append(tensor)
                    copies[id(tensor)] = ir.Tensor(to_torch(tensor.numpy()).numpy(), name=name)
                node.attributes[name] = ir.AttrTensor(name, copies[id(tensor)])
    constants: dict[str | None, Tensor] = {}
    for value in graph.initializers.values():
        tensor = loaded[value.name] if value.name in loaded else read_tensor(value, path)
        constants[value.name] = tensor
        value.const_value = ir.Tensor(tensor.numpy(), name=value.name)
    return constants


def read_tensor(value: ir.Value, path: Path) -> Tensor:
    """A weight from the file or from the data beside it."""
    tensor = value.const_value
    name = text_of(value)
    if tensor is None:
        raise InputError(path, f"the weight '{name}' has no values", HINT)
    shape = tensor.shape.numpy()
    count = math.prod(shape)
    if any(size < 0 for size in shape) or count > MAX_TENSOR_BYTES:
        raise InputError(path, f"the weight '{name}' has an impossible shape", HINT)
    if isinstance(tensor, ir.ExternalTensor):
        return to_torch(read_external(tensor, name, path))
    try:
        return to_torch(tensor.numpy())
    except (ValueError, TypeError) as error:
        raise InputError(path, f"the weight '{name}' is damaged: {error}", HINT) from error


def read_external(tensor: ir.ExternalTensor, name: str, path: Path) -> np.ndarray:
    """A weight's values from a file in the folder of the model."""
    file = beside(path, str(tensor.location), name)
    hint = "keep the data files beside the model, as it was exported"
    nbytes = int(tensor.nbytes)
    offset = tensor.offset or 0
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(
            file, f"the data of '{name}' cannot be read: {error.strerror}", hint
        ) from error
    with open(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InputError(file, f"the data of '{name}' is in no regular file", hint)
        if offset < 0 or tensor.length not in (None, nbytes) or offset + nbytes > status.st_size:
            raise InputError(
                file,
                f"the data of '{name}' is {size_text(nbytes)} at {offset}, which a file of {status.st_size} "
                "bytes does not hold",
                hint,
            )
        dtype = tensor.dtype.numpy()
        shape = tensor.shape.numpy()
        count = math.prod(shape)
        if dtype.itemsize * count != nbytes:
            raise InputError(file, f"the data of '{name}' has values of less than a byte", HINT)
        return np.fromfile(opened, dtype, count, offset=offset).reshape(shape)


def beside(path: Path, location: str, name: str) -> Path:
    """The path of a data file in a model's folder; InputError for one elsewhere or behind a link."""
    parts = PurePosixPath(location).parts
    if (
        not parts
        or location.startswith("/")
        or "\\" in location
        or ".." in parts
        or re.match(r"[A-Za-z]:", location)
    ):
        raise InputError(
            path,
            f"the data of '{name}' is outside the folder of the file",
            "keep it beside the model",
        )
    file = path.parent
    for part in parts:
        file = file / part
        if file.is_symlink():
            raise InputError(
                path, f"the data of '{name}' is behind the link {part}", "put the file itself there"
            )
    return file


# The graph


def finish(
    model: ir.Model, graph: ir.Graph, folded: Folded, state: dict[str, Tensor], cut: Cut | None
) -> Graph:
    """Write the document and describe its input and outputs."""
    described = []
    for value in [*graph.inputs, *graph.outputs]:
        first, second = folded.shapes[value]
        sizes: list[int | str] = [
            size if size == other else _batch_size(size, folded.batch)
            for size, other in zip(first, second)
        ]
        dtype = from_torch_dtype(folded.dtypes[value])
        value.shape = ir.Shape([size if isinstance(size, int) else str(size) for size in sizes])
        value.type = ir.TensorType(dtype)
        described.append(
            TensorInfo(
                text_of(value), str(folded.dtypes[value]).removeprefix("torch."), tuple(sizes)
            )
        )
    document = ir.Model(graph, ir_version=min(model.ir_version, 10), producer_name="gemel")
    name_ends(document)
    for domain in list(graph.opset_imports):
        if domain not in ("", "ai.onnx"):
            del graph.opset_imports[domain]
    return Graph(
        write_document(document),
        state,
        described[0],
        tuple(described[1:]),
        dict(model.metadata_props),
        cut,
        led=folded.led,
    )


def _batch_size(size: int, batch: int) -> str:
    """The name of a size that the batch decides: batch, or 4*batch."""
    return BATCH if size == batch else f"{size // batch}*{BATCH}"
