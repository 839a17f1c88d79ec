"""Reads a .pt2 file of torch.export as data, and writes it as ONNX.

`torch.export.load` generates source code from the names of a program, unpickles samples and evaluates sizes. So it is
never given a file as it came, but a program built anew from what the file says (program_schema.py), in an archive of
our own (program_archive.py). The file's names of weights, inputs and outputs are put back into what torch wrote.
"""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import onnx_ir as ir
import torch

from gemel.models.errors import InputError, message_of
from gemel.models.graph.program_archive import open_archive, write_archive
from gemel.models.graph.program_fields import ProgramFault
from gemel.models.graph.program_schema import ProgramDocument, rebuild_program
from gemel.models.process import quiet

HINT = "save it with torch.export.save(torch.export.export(model.eval(), (picture,)), 'model.pt2'), or export ONNX"
MAX_VALUES = 2**28
"""Of a tensor that a program computes for one picture: an optimiser of constants would compute it."""
MAX_NAME = 200
"""Characters of a name of the file's that are put back."""


def convert_program(path: Path) -> bytes:
    """The ONNX model of a .pt2 file; InputError for one that is damaged or would need to be unpickled or run."""
    from torch.onnx import export

    document, copy = copy_program(path)
    try:
        with quiet():
            program = torch.export.load(copy)
            written = export(
                program, (), dynamo=True, opset_version=18, verbose=False, optimize=False
            )
            assert written is not None
            restore_names(written.model.graph, document)
            check_sizes(written.model.graph)
            written.optimize()
        return written.model_proto.SerializeToString()
    except ProgramFault as fault:
        raise InputError(path, str(fault), fault.hint or HINT) from fault
    except Exception as error:  # torch raises many kinds for a malformed program
        raise InputError(path, f"cannot be read as a program: {message_of(error)}", HINT) from error


def copy_program(path: Path) -> tuple[ProgramDocument, io.BytesIO]:
    """What a .pt2 file says, and an archive of that alone, with names of our own."""
    try:
        with open_archive(path) as archive:
            document = rebuild_program(archive.read_json("models/model.json"))
            payloads = archive.find_weights(document.weights)
            return document, write_archive(document, payloads, archive)
    except ProgramFault as fault:
        raise InputError(path, str(fault), fault.hint or HINT) from fault


def restore_names(graph: ir.Graph, document: ProgramDocument) -> None:
    """Call the weights, inputs and outputs of a graph as the file does, as far as names are letters and digits."""
    taken = {value.name for node in graph for value in node.outputs}
    taken |= {value.name for value in [*graph.inputs, *graph.initializers.values()]}
    keys = {weight.name: weight.key for weight in document.weights}
    values = [value for name, value in graph.initializers.items() if name in keys]
    pairs = [(value, keys[str(value.name)]) for value in values]
    pairs += zip(graph.inputs, document.inputs, strict=False)
    for value, name in pairs:
        readable = re.sub(r"[^\w.]", "_", name, flags=re.ASCII)[:MAX_NAME]
        if readable and readable not in taken:
            taken.add(readable)
            value.name = readable


def check_sizes(graph: ir.Graph) -> None:
    """Refuse a program that computes a huge tensor, before anything is computed."""
    for node in graph:
        for value in node.outputs:
            sizes = [size for size in value.shape or () if isinstance(size, int)]
            if math.prod(sizes) > MAX_VALUES:
                raise ProgramFault(f"computes a tensor of {' x '.join(map(str, sizes))} values")
