"""The process that prepares the graphs of a bundle, one query at a time, and ends: `python -m ... BUNDLE FOLDER`.

ONNX Runtime optimises each graph once for this processor and writes it with its weights as it laid them out. Then equal
weights of all graphs are put once into one file, and each graph is run on it and compared with its run before.
"""

from __future__ import annotations

import gc
import hashlib
import mmap
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
import onnxruntime

from gemel.edge_runtime.engines.mapped_session import MappedSession, open_session
from gemel.edge_runtime.engines.prepared import (
    FORMAT,
    PAGE_BYTES,
    WEIGHTS,
    PreparationError,
    PreparedBundle,
    PreparedContent,
    PreparedIndex,
    PreparedQuery,
    PreparedTensor,
    index_json,
    remove_tree,
)
from gemel.edge_runtime.memory.pages import MappedWeights
from gemel.edge_runtime.memory.usage import process_peak_bytes, process_status
from gemel.models.bundle import Bundle, BundleQuery, open_bundle
from gemel.models.bundle.stored_arrays import BundleArrays
from gemel.models.errors import message_of
from gemel.models.export.network_outputs import NetworkOutputs, OutputReader, describe_outputs
from gemel.models.graph.activations import use_exact_products
from gemel.models.graph.query_graph import (
    FOLDING_FUSIONS,
    NormUses,
    build_query_graph,
    count_norm_uses,
    reads_shared_weights,
)
from gemel.models.process import trim_heap

RESULT, WORK = "result.json", "work"
"""The file of the index without its key, and the folder of what is not needed in the end."""
MIN_EXTERNAL_BYTES = 1024
"""Smaller weights lie in the graphs themselves."""
LINE_BYTES = 64
TOLERANCE = 1e-3
"""By which outputs may differ from those before, in parts of the largest one."""
MEASURED_BATCHES = (1, 4)
PREPACKED = "prepacked_"
"""Begins the key of external data that names blocks which ONNX Runtime packed for its kernels."""
COLD = 1 << 30
"""Ranks contents that no run reads behind all others."""
DTYPES = {1: "float32", 2: "uint8", 3: "int8", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 11: "float64"}
"""NumPy's names of the data types whose values are bound, by TensorProto's numbers."""


def main(arguments: Sequence[str]) -> int:
    """Prepare a bundle in a folder; each query is named on stdout before its turn."""
    path, folder, threads, *skipped = arguments
    bundle = open_bundle(path)
    index = prepare_queries(bundle, Path(folder), int(threads), skipped, lambda query: print(query, flush=True))
    (Path(folder) / RESULT).write_bytes(index_json(index))
    return 0


def prepare_queries(
    bundle: Bundle, folder: Path, threads: int, skipped: Sequence[str], on_query: Callable[[str], object]
) -> PreparedIndex:
    """Write weights.bin and the graphs of all queries that have a document; returns the index, with an empty key."""
    started = time.perf_counter()
    work = folder / WORK
    work.mkdir()
    tensors = BundleArrays(bundle)
    queries = [query for query in bundle.queries if query.network_document is not None and query.id not in skipped]
    uses = count_norm_uses(queries, tensors.document_of)
    counts = Counter(name for query in queries for name in set(query.tensors.values()))
    failed, optimised = {}, dict[str, OptimisedGraph]()
    for place, query in enumerate(queries):
        on_query(query.id)
        try:
            is_shared = reads_shared_weights(query, counts)
            optimised[query.id] = optimise(query, tensors, uses, work / str(place), threads, is_shared)
        except Exception as error:  # ONNX Runtime's errors have no common type
            failed[query.id] = message_of(error)[:300]
        gc.collect()  # graphs refer to themselves
        trim_heap()
        bundle.mapping.madvise(mmap.MADV_DONTNEED)  # the next query reads others of its pages
    contents, weights_bytes = write_weights(folder / WEIGHTS, optimised)
    if not optimised:
        return PreparedIndex(FORMAT, "", 0, (), {}, failed, 0, time.perf_counter() - started)
    prepared = {}
    for place, (query, graph) in enumerate(optimised.items()):
        prepared[query] = write_graph(folder, f"{place}.onnx", graph, contents)
    index = PreparedIndex(FORMAT, "", weights_bytes, tuple(contents.placed), prepared, failed, 0, 0.0)
    weights = MappedWeights(folder / WEIGHTS)
    for query, graph in optimised.items():
        on_query(query)
        try:
            prepared[query] = check_query(PreparedBundle(folder, index), query, weights, graph.outputs, threads)
        except Exception as error:
            failed[query] = message_of(error)[:300]
            del prepared[query]
    remove_tree(work)
    peak = process_status("VmHWM") if sys.platform.startswith("linux") else 0
    seconds = time.perf_counter() - started
    return PreparedIndex(FORMAT, "", weights_bytes, tuple(contents.placed), prepared, failed, peak, seconds)


@dataclass(frozen=True)
class OptimisedGraph:
    """A graph as ONNX Runtime wrote it, beside its weights, and what it gave for the frames of `example_frames`."""

    path: Path
    outputs: tuple[np.ndarray, ...]
    described: NetworkOutputs

    def model(self) -> onnx.ModelProto:
        """The graph, without its weights."""
        return onnx.load(self.path, load_external_data=False)


def optimise(
    query: BundleQuery, tensors: BundleArrays, uses: NormUses, path: Path, threads: int, is_shared: bool
) -> OptimisedGraph:
    """Let ONNX Runtime optimise the graph of a query for this processor; files begin with `path`."""
    described = describe_outputs(query, tensors.array_of(str(query.network_document)).tobytes())
    OutputReader(query, described)  # a box could not read what it refuses
    source = path.with_suffix(".onnx")
    graph = build_query_graph(query, tensors.document_of(query), tensors.array_of, uses, tensors.header)
    graph.save(source, MIN_EXTERNAL_BYTES)
    del graph
    target = path.with_suffix(".optimised")
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, threads
    options.optimized_model_filepath = str(target)
    prefix = "session.optimized_model_external_initializers"
    options.add_session_config_entry(f"{prefix}_file_name", f"{path.name}.weights")
    options.add_session_config_entry(f"{prefix}_min_size_in_bytes", str(MIN_EXTERNAL_BYTES))
    options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
    use_exact_products(options)
    disabled = FOLDING_FUSIONS if is_shared else ()
    session = onnxruntime.InferenceSession(
        str(source), options, providers=["CPUExecutionProvider"], disabled_optimizers=list(disabled)
    )
    outputs = session.run(None, {session.get_inputs()[0].name: example_frames(session.get_inputs()[0].shape)})
    source.with_name(f"{source.name}.data").unlink()
    # Copies: what a session gave keeps its whole arena.
    return OptimisedGraph(target, tuple(np.array(output) for output in outputs), described)


def example_frames(shape: Sequence[int | str | None], batch: int = 1) -> np.ndarray:
    """Drawn frames of an input's shape; open sizes are `batch`."""
    sizes = [size if isinstance(size, int) else batch for size in shape]
    return np.random.default_rng(0).standard_normal(sizes, np.float32)


# Weights


@dataclass(frozen=True)
class _Piece:
    """Bytes of a file of weights; `is_read`: by runs."""

    path: Path
    offset: int
    nbytes: int
    is_read: bool

    def read(self) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(self.nbytes)


@dataclass
class WrittenContents:
    """The contents of weights.bin in order, and the place of each by digest."""

    placed: list[PreparedContent] = field(default_factory=list)
    by_digest: dict[str, int] = field(default_factory=dict)
    digests: dict[_Piece, str] = field(default_factory=dict)

    def place_of(self, piece: _Piece) -> int:
        """Where a piece went, as a place in `placed`."""
        return self.by_digest[self.digests[piece]]


def _pieces_of(graph: OptimisedGraph) -> Iterator[_Piece]:
    for tensor in graph.model().graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        entry = {one.key: one.value for one in tensor.external_data}
        yield _piece_of(graph, entry)
        for key, value in entry.items():
            if key.startswith(PREPACKED):
                yield from (piece for piece, _ in _blocks_of(graph, value))


def _piece_of(graph: OptimisedGraph, entry: dict[str, str]) -> _Piece:
    is_packed = any(key.startswith(PREPACKED) for key in entry)
    path = graph.path.parent / Path(entry["location"]).name
    return _Piece(path, int(entry.get("offset", 0)), int(entry["length"]), not is_packed)


def _blocks_of(graph: OptimisedGraph, value: str) -> Iterator[tuple[_Piece, str]]:
    """The packed blocks that a value `KERNEL|offset;length;flags|...` names, and the flags of each."""
    location = graph.path.with_suffix(".weights")
    for block in value.split("|")[1:]:
        offset, nbytes, flags = block.split(";")
        yield _Piece(location, int(offset), int(nbytes), True), flags


def write_weights(path: Path, graphs: dict[str, OptimisedGraph]) -> tuple[WrittenContents, int]:
    """Write the weights of all graphs, equal ones once; returns where they are, and the bytes of the file.

    What the same queries read lies together and begins at a page, what most read comes first: so pages are read in and
    given back as a whole. What no run reads comes last.
    """
    contents = WrittenContents()
    users: dict[str, list[int]] = {}
    pieces: dict[str, _Piece] = {}
    for place, graph in enumerate(graphs.values()):
        for piece in _pieces_of(graph):
            digest = hashlib.sha256(piece.read()).hexdigest()
            contents.digests[piece] = digest
            readers = users.setdefault(digest, [])
            if piece.is_read and place not in readers:
                readers.append(place)
            pieces.setdefault(digest, piece)
    first_use = {digest: at for at, digest in enumerate(users)}

    def rank(digest: str) -> tuple[int, list[int], int]:
        readers = users[digest]
        return (-len(readers) if readers else COLD), readers, first_use[digest]

    with open(path, "wb") as file:
        before: list[int] | None = None
        for digest in sorted(users, key=rank):
            _align(file, LINE_BYTES if users[digest] == before else PAGE_BYTES)
            before = users[digest]
            contents.by_digest[digest] = len(contents.placed)
            contents.placed.append(PreparedContent(digest, file.tell(), pieces[digest].nbytes))
            file.write(pieces[digest].read())
        _align(file, PAGE_BYTES)
        return contents, file.tell()


def _align(file: BinaryIO, alignment: int) -> None:
    file.write(bytes(-file.tell() % alignment))


def write_graph(folder: Path, name: str, graph: OptimisedGraph, contents: WrittenContents) -> PreparedQuery:
    """Write a graph that refers to weights.bin; workspace is measured later."""
    model = graph.model()
    tensors: list[PreparedTensor] = []
    reads: dict[int, None] = {}
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        entry = {one.key: one.value for one in tensor.external_data}
        piece = _piece_of(graph, entry)
        place = contents.place_of(piece)
        is_bound = piece.is_read and tensor.data_type in DTYPES
        dtype = DTYPES.get(tensor.data_type, "")
        tensors.append(PreparedTensor(tensor.name, dtype, tuple(tensor.dims), place, is_bound))
        if piece.is_read:
            reads[place] = None
        content = contents.placed[place]
        fields = {"location": WEIGHTS, "offset": str(content.offset), "length": str(content.nbytes)}
        for key, value in entry.items():
            if not key.startswith(PREPACKED):
                continue
            kernel = [value.split("|")[0]]
            for block, flags in _blocks_of(graph, value):
                at = contents.place_of(block)
                reads[at] = None
                kernel.append(f"{contents.placed[at].offset};{contents.placed[at].nbytes};{flags}")
            fields[key] = "|".join(kernel)
        del tensor.external_data[:]
        for key, value in fields.items():
            tensor.external_data.add(key=key, value=value)
    data = model.SerializeToString()
    (folder / name).write_bytes(data)
    frames = model.graph.input[0]
    shape = tuple(axis.dim_param or axis.dim_value for axis in frames.type.tensor_type.shape.dim)
    batch = shape[0] if isinstance(shape[0], int) and shape[0] > 0 else None
    digest = hashlib.sha256(data).hexdigest()
    return PreparedQuery(
        name, digest, frames.name, shape, graph.described, batch, tuple(tensors), tuple(sorted(reads)), {}
    )


# Checks


def check_query(
    prepared: PreparedBundle, query_id: str, weights: MappedWeights, outputs: Sequence[np.ndarray], threads: int
) -> PreparedQuery:
    """Run a prepared graph as a box does; PreparationError where it answers otherwise than before. Measures it."""
    # What an arena keeps would be reused unnoticed by the run that is measured.
    query = prepared.index.queries[query_id]
    session = open_session(prepared, query_id, weights, threads, has_arena=False)
    frames = example_frames(query.input_shape)
    for answer, expected in zip(session.run(frames), outputs, strict=True):
        _check_equal(answer, expected)
    workspace = measure_workspace(session, query)
    weights.give_back(prepared.index.contents[place].extent for place in query.reads)
    return PreparedQuery(**{**query.__dict__, "workspace": workspace})


def _check_equal(answer: Any, expected: np.ndarray) -> None:
    if not np.issubdtype(expected.dtype, np.floating) or answer.shape != expected.shape:
        return  # indices and counts of what a network suppressed jump with the last bit of a score
    largest = float(np.abs(expected).max(initial=0.0))
    if not np.allclose(answer, expected, rtol=TOLERANCE, atol=TOLERANCE * max(largest, 1e-6)):
        raise PreparationError("it answers otherwise than before it was prepared")


def measure_workspace(session: MappedSession, query: PreparedQuery) -> dict[int, int]:
    """Peak bytes of a run by batch, frames included; empty where the system does not report it."""
    peaks = {}
    for count in MEASURED_BATCHES if query.batch is None else (query.batch,):
        frames = example_frames(query.input_shape, count)
        peak = process_peak_bytes(lambda: session.run(frames))  # noqa: B023 (called in this iteration)
        if peak is None:
            return {}
        peaks[count] = peak + frames.nbytes
    return peaks


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
