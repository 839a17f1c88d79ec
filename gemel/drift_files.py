"""The originals of a drift check where only a box's libraries are installed: ONNX files, run by ONNX Runtime.

The box's bundle says how frames are prepared and how outputs are read. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from gemel.edge_runtime.engines.mapped import SessionEngine
from gemel.edge_runtime.engines.mapped_session import MappedSession, session_options
from gemel.edge_runtime.engines.prepared import PreparedQuery
from gemel.edge_runtime.frames.samples import Predict
from gemel.models.bundle import Bundle, open_bundle
from gemel.models.errors import InputError, join_names, message_of
from gemel.models.export.network_outputs import describe_outputs
from gemel.models.files.extras import MERGE
from gemel.models.files.io import MAX_QUERIES, read_yaml
from gemel.models.predictions import Prediction
from gemel.originals import Original, Originals, read_bundle_name

HINT = f"pip install {MERGE}"


class _Query(BaseModel):
    id: str
    model: str


class _Workload(BaseModel):
    """What of a workload file is read here."""

    name: str = "workload"
    queries: list[_Query]


@dataclass
class OriginalSession(MappedSession):
    """A session of an original; of its file's outputs those that the bundle's network has."""

    names: tuple[str, ...] = ()

    def run(self, frames: np.ndarray) -> list[np.ndarray]:
        return self.session.run(list(self.names), {self.query.input: frames})


class OriginalEngine(SessionEngine):
    """An original over a session that holds its weights."""

    @property
    def weights(self) -> dict[str, int]:
        return {}


def open_originals(spool: Path, workload: Path, bundle: str | Path | None) -> Originals:
    """The originals that are ONNX files; InputError for any that is not, or that another network answers for."""
    load = read_yaml(workload, _Workload, "workload file", "`name:`, `cameras:` and `queries:`")
    opened = open_bundle(bundle or read_bundle_name(spool))
    paths = {query.id: workload.resolve().parent / query.model for query in load.queries[:MAX_QUERIES]}
    if paths.keys() != {query.id for query in opened.queries}:
        odd = join_names(sorted(paths.keys() ^ {query.id for query in opened.queries}))
        raise InputError(opened.path, f"does not hold the queries of {workload.name} ({odd})", "give its own workload")
    rows = []
    for query, path in ((opened.query(name), path) for name, path in paths.items()):
        if path.suffix.lower() != ".onnx" or query.graph is None:
            problem = f"the original of query {query.id} is no ONNX file, so it needs torch"
            raise InputError(workload, problem, HINT)
        if not path.is_file():
            raise InputError(path, "there is no such file", "give the model that was merged")
        if query.substitution is not None:
            raise InputError(opened.path, f"query {query.id} is answered by another network, which needs torch", HINT)
        rows.append(Original(query, query, partial(load_predict, opened, query.id, path)))
    files = [(f"the model of {name}", path) for name, path in paths.items()]
    return Originals(load.name, tuple(rows), (("the workload", workload), *files), opened)


def load_predict(bundle: Bundle, query_id: str, path: Path) -> Predict:
    """What a query's own file answers to samples; InputError for a file that does not fit the bundle."""
    engine = OriginalEngine(bundle, query_id, open_session(bundle, query_id, path))

    def predict(pictures: np.ndarray, sizes: Sequence[tuple[int, int]]) -> list[Prediction]:
        return engine.decode(engine.infer(pictures), sizes, 0.0)

    return predict


def open_session(bundle: Bundle, query_id: str, path: Path) -> OriginalSession:
    """A session of a file whose outputs are read as those of the query in the bundle are; InputError as above."""
    import onnxruntime

    query, document = bundle.query(query_id), bundle.document_of(query_id)
    options = session_options(1)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    try:
        session: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's errors have no common type
        raise InputError(path, f"ONNX Runtime cannot open it: {message_of(error)[:300]}", HINT) from error
    outputs = describe_outputs(query, document)
    names = tuple(output.name for output in outputs.head.outputs) if outputs.head is not None else ()
    frames, known = session.get_inputs()[0], {output.name for output in session.get_outputs()}
    is_whole = outputs.head is not None and outputs.head.is_whole
    if not names or not known.issuperset(names) or frames.type != "tensor(float)" or is_whole:
        problem = f"is not the network of query {query_id} as it was merged, or was changed when it was read"
        raise InputError(path, problem, HINT)
    batch = frames.shape[0] if isinstance(frames.shape[0], int) else None
    described = PreparedQuery(path.name, "", frames.name, tuple(frames.shape), outputs, batch, (), (), {})
    return OriginalSession(described, session, names=names)
