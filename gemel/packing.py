"""`gemel pack`: ONNX files as they are in one bundle, and what that takes beside plain sessions, measured here.

Equal tensors are stored once. With frames, weights become int8 where footage proves that the answers stay. Each file is
a query and a camera of its own, named after the file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gemel.edge_runtime.engines.prepare import prepare_bundle
from gemel.merger import MergeOptions, merge
from gemel.merger.checkpoint import WORK_SUFFIX
from gemel.models.bundle import Bundle, BundleQuery, Made, check_output, open_bundle, write_bundle
from gemel.models.decoders.files import ModelFile
from gemel.models.errors import Faults, InputError, one_line
from gemel.models.export.export_document import export_documents
from gemel.models.files.io import open_atomic
from gemel.models.files.pictures import list_pictures
from gemel.models.files.video import Video
from gemel.models.files.weights import load_weights
from gemel.models.notes import add_note
from gemel.models.sharing.layers import layers_of_all, model_bytes
from gemel.models.sharing.similarity import ceiling_with_copies, copies
from gemel.models.stages import Progress, Stages, silent
from gemel.models.workload import Workload, load_workload
from gemel.models.zoo import build_query
from gemel.text import percent, size, table

CHILD = "gemel.packing_child"
PLAIN, PACKED = "plain", "packed"
READ, WRITE, PREPARE = "reading the files", "writing the bundle", "preparing its graphs"
TRY = "trying weights in int8"
MEASURE = {PLAIN: "measuring plain sessions", PACKED: "measuring the bundle"}
SUFFIX = ".onnx"
SOURCES = "SOURCE is an address (rtsp://...), a video, a folder of pictures, or the number of a USB camera"


@dataclass(frozen=True)
class PackedFile:
    """A file and its query: bytes of its weights; the part of its answers that stayed, None where none were compared.

    `bits` are those of its weights in the bundle, where these are fewer than the file's.
    """

    id: str
    path: str
    bytes: int
    agreement: float | None
    bits: str | None


@dataclass(frozen=True)
class SessionCost:
    """What sessions of all files take in a process of their own, after three runs of each on one thread.

    `pss_bytes` is the memory of the process, `anonymous_bytes` the part of it that the system cannot take back, `ms`
    the processor time of one frame, a mean over the files.
    """

    pss_bytes: int
    anonymous_bytes: int
    ms: float


@dataclass(frozen=True)
class PackReport:
    """The outcome of `pack`: plain sessions of ONNX Runtime beside the bundle's own.

    `ceiling_fraction` is the part of the bundle's weights that would go if all layers of equal form were shared.
    """

    bundle: str
    bytes_before: int
    bytes_after: int
    files: tuple[PackedFile, ...]
    sessions: SessionCost
    packed: SessionCost
    ceiling_fraction: float

    def to_json(self) -> dict[str, Any]:
        """The keys of `gemel pack --json`."""
        return json.loads(json.dumps(asdict(self)))

    def to_text(self) -> str:
        """One table, and what merging could bring."""
        agreements = [file.agreement for file in self.files if file.agreement is not None]
        answers = percent(min(agreements)) if agreements else "unchanged"
        arms = ((f"{len(self.files)} sessions of ONNX Runtime", self.sessions, ""), (PACKED, self.packed, answers))
        rows = [
            (name, size(cost.pss_bytes), size(cost.anonymous_bytes), f"{cost.ms:.1f}", kept)
            for name, cost, kept in arms
        ]
        head = ("", "memory of the process", "of it anonymous", "ms a frame", "answers as before, the worst")
        lines = [
            table(head, rows), "",
            f"{self.bundle}: weights of {size(self.bytes_before)} became {size(self.bytes_after)}",
        ]  # fmt: skip
        if self.ceiling_fraction > 0:
            saved = percent(self.ceiling_fraction, 0)
            lines.append(f"layers of equal form: up to {saved} less by `gemel merge`, with footage of each camera")
        cameras = " ".join(f"--camera {file.id}=SOURCE" for file in self.files)
        lines += ["", f"serve it: gemel run {self.bundle} {cameras}", SOURCES]
        return "\n".join(lines)

    __repr__ = to_text


def pack(
    files: Sequence[str | Path],
    out: str | Path,
    frames: str | Path | None = None,
    progress: Progress = silent,
    accept_unproven: bool = False,
) -> PackReport:
    """Write ONNX files into one bundle at `out`, prepare it, and measure it beside plain sessions of the files.

    `frames` is a video or a folder of pictures like those that the files will see. What they are too few to prove in
    int8 stays as it is, unless `accept_unproven` lets plain agreement decide. Raises InputError, with nothing
    written, for a file that cannot be read or is given twice.
    """
    out, paths = check_output(Path(out), overwrite=False), [Path(file).absolute() for file in files]
    names = name_files(paths)
    if frames is not None:
        _check_frames(Path(frames))
    write, stages = WRITE if frames is None else TRY, Stages(progress)
    stages.announce([READ, write, PREPARE, *MEASURE.values()])
    stages.begin(READ)
    with tempfile.TemporaryDirectory(prefix="gemel-pack-") as folder:
        workload = _make_workload(names, frames, Path(folder) / "pack.yaml")
        sizes = {query.id: model_bytes(query) for query in workload.queries}
        stages.begin(write)
        if frames is None:
            agreements = dict.fromkeys((query.id for query in workload.queries), None)
            _write_unchanged(workload, sizes, out)
        else:
            options = MergeOptions(weights="int8", documents=True, accept_unproven=accept_unproven)
            with _remove_work(Path(f"{out}{WORK_SUFFIX}")):
                merged = merge(workload, out, "none", progress=progress, options=options)
            agreements = {query.id: query.agreement for query in merged.queries}
    stages.begin(PREPARE)
    bundle = open_bundle(out)
    prepared = prepare_bundle(bundle)
    if prepared.index.failed:
        query, reason = next(iter(prepared.index.failed.items()))
        raise InputError(out, f"query {query} could not be prepared: {reason}", "leave its file out")
    rows = []
    for query, path in zip(bundle.queries, paths, strict=True):
        bits = ", ".join(sorted({stored.dtype for stored in query.stored.values()})) or None
        rows.append(PackedFile(query.id, str(path), sizes[query.id], agreements[query.id], bits))
    shapes = {query.id: prepared.index.queries[query.id].input_shape for query in bundle.queries}
    plain = {query: {"path": str(path), "shape": shapes[query]} for query, path in zip(shapes, paths, strict=True)}
    costs = dict[str, SessionCost]()
    for kind, request in ((PLAIN, plain), (PACKED, {"bundle": str(out.absolute())})):
        stages.begin(MEASURE[kind])
        costs[kind] = measure(kind, request)
    return PackReport(
        str(out), bundle.manifest.bytes.before, bundle.manifest.bytes.after, tuple(rows), costs[PLAIN], costs[PACKED],
        _find_ceiling(bundle),
    )  # fmt: skip


def _check_frames(frames: Path) -> None:
    """Raise InputError where there is no frame, before anything takes time."""
    if not frames.exists():
        raise InputError("--frames", f"{frames} does not exist", "give a video or a folder of pictures")
    if frames.is_dir():
        if not any(list_pictures(Path(folder)) for folder, _, _ in os.walk(frames)):
            raise InputError(frames, "holds no pictures", "give a video or a folder of pictures", "--frames")
        return
    with closing(Video(str(frames), lambda *_: None)) as video:
        if not video.advance():
            raise InputError(frames, "is not a video with frames", "give a video that decodes", "--frames")


@contextmanager
def _remove_work(folder: Path) -> Iterator[None]:
    """Remove what a merge within this block stores to go on later: nothing goes on from the files of `pack`."""
    is_new = not folder.exists()
    try:
        yield
    except BaseException:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _find_ceiling(bundle: Bundle) -> float:
    """The part of a bundle's weights that would go if its queries shared all layers of equal form."""
    counts = bundle.manifest.bytes  # `after` has what is equal once, `stored` as often as it is used
    stored = sum(bundle.nbytes(name) for query in bundle.queries for name in set(query.tensors.values()))
    least = (counts.before - counts.ceiling) * stored / max(1, counts.before)
    return max(0.0, 1 - least / counts.after) if counts.after else 0.0


def name_files(paths: Sequence[Path], suffixes: Collection[str] = (SUFFIX,)) -> dict[str, Path]:
    """An id for each file, from its name; InputError for all that are given twice or have none of the suffixes."""
    names, faults = dict[str, Path](), Faults()
    for place, path in enumerate(paths):
        faults.attempt(partial(_check_file, path, paths[:place], suffixes))
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-")[:80] or "model"
        name, number = stem, 2
        while name in names:
            name, number = f"{stem}-{number}", number + 1
        names[name] = path
    faults.finish()
    return names


def _check_file(path: Path, earlier: Sequence[Path], suffixes: Collection[str]) -> None:
    if path.suffix.lower() not in suffixes:
        kinds, hint = " or ".join(suffixes), "export the model to ONNX; `gemel merge` takes others"
        raise InputError(path, f"is no {kinds} file", hint)
    if any(os.path.realpath(path) == os.path.realpath(file) for file in earlier):
        raise InputError(path, "is given twice", "give each file once")


def _make_workload(names: Mapping[str, Path], frames: str | Path | None, path: Path) -> Workload:
    """The workload that the files stand for; InputError with what is wrong with each of them."""
    faults = Faults()
    described = {name: faults.attempt(partial(_describe_file, file)) for name, file in names.items()}
    faults.finish()
    source = "0" if frames is None else str(Path(frames).absolute())
    shown = {} if frames is None else {"data": source, "labels": "none"}
    cameras = {name: {"source": source} for name in names}
    queries = [{"id": name, "camera": name, **(keys or {}), **shown} for name, keys in described.items()]
    # JSON is YAML.
    text = json.dumps({"name": "pack", "cameras": cameras, "queries": queries})
    with open_atomic(path, overwrite=False) as file:
        file.write(text.encode())
    return load_workload(path)


def _describe_file(file: Path) -> dict[str, Any]:
    """The keys of a file's query; outputs that no decoder reads are passed on."""
    keys: dict[str, Any] = {"model": str(file)}
    try:
        described = ModelFile(file).complete()
    except InputError as error:
        described = ModelFile(file, task="tensor").complete()  # what is wrong with the file itself is raised here
        keys |= {"task": "tensor", "agreement": "relative-error"}
        add_note(file, f"its outputs are passed on as they are: {one_line(error.problem)}")
    if described.preprocess() is None:
        keys["preprocess"] = "unit"
        add_note(file, "does not say how frames are prepared: red, green and blue from 0 to 1 are taken")
    return keys


def _write_unchanged(workload: Workload, sizes: Mapping[str, int], out: Path) -> None:
    """The bundle of the files as they are."""
    models = {query.id: load_weights(query, build_query(query)).eval() for query in workload.queries}
    records = [BundleQuery.of(query) for query in workload.queries]
    twins = copies({query: model.state_dict() for query, model in models.items()})
    provenance = Made(workload.name, "none", ceiling_with_copies(layers_of_all(workload.queries), sizes, twins))
    write_bundle(out, models, records, provenance, documents=export_documents(models, records))


def measure(kind: str, request: Mapping[str, Any]) -> SessionCost:
    """Open the sessions in a process without torch, run each, and read its memory and processor time."""
    root = Path(__file__).parent.parent
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", CHILD, kind, json.dumps(request)], env=environment, capture_output=True, text=True,
        errors="replace", check=False,
    )  # fmt: skip
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise InputError("gemel pack", f"the {kind} sessions could not be measured: {lines[-1][:300]}")
    return SessionCost(**json.loads(done.stdout.splitlines()[-1]))
