"""`gemel init`: a workload file and a box file with comments, from cameras and the files of models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemel.box_file import choose_memory, read_cameras
from gemel.models.decoders.files import ModelFile
from gemel.models.errors import InputError, join_names, one_line
from gemel.models.files.io import check_output, is_path, open_atomic
from gemel.models.preprocess import NORMALISATIONS
from gemel.models.workload import load_workload
from gemel.models.zoo.user_models import MODEL_FILES
from gemel.packing import name_files

WORKLOAD_FILE, BOX_FILE, BUNDLE_FILE = "workload.yaml", "box.yaml", "box.safetensors"
Ask = Callable[[str], str]
"""A question -> the answer, empty for none."""


@dataclass(frozen=True)
class StartingFiles:
    """The files that `write_starting_files` wrote, and what they say."""

    workload: Path
    box: Path
    queries: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The keys of `gemel init --json`."""
        return {"workload": str(self.workload), "box": str(self.box), "queries": list(self.queries)}

    def to_text(self) -> str:
        """What comes next."""
        return (
            f"wrote {self.workload} and {self.box}\n\n"
            f"gemel inspect {self.workload}                # what merging could save\n"
            f"gemel merge {self.workload} -o {self.box.with_name(BUNDLE_FILE)}   # --method none: nothing is shared\n"
            f"gemel run {self.box}"
        )


def write_starting_files(
    folder: str | Path, cameras: Sequence[str], models: Sequence[str], ask: Ask = lambda question: ""
) -> StartingFiles:
    """Write `workload.yaml` and `box.yaml` into a folder, which is made.

    `cameras` are NAME=SOURCE; `models` are FILE or FILE@CAMERA: without a camera that of the file's name, or the only
    one. `ask` puts a question for what a file does not say (classes, preprocessing); without an answer its outputs are
    numbers, and values from 0 to 1 are taken. Raises InputError, with nothing written, for what does not fit or is
    there already.
    """
    folder = Path(folder)
    sources = read_cameras(cameras)
    queries = _read_models(models, sources, ask)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [check_output(folder / name, overwrite=False) for name in (WORKLOAD_FILE, BOX_FILE)]
    texts = (_workload_text(folder, sources, queries), _box_text(sources))
    written = list[Path]()
    try:
        for path, text in zip(paths, texts, strict=True):
            with open_atomic(path, overwrite=False) as file:
                file.write(text.encode())
            written.append(path)
        workload = load_workload(paths[0])
    except InputError:
        for path in written:
            path.unlink()
        raise
    return StartingFiles(paths[0], paths[1], tuple(query.id for query in workload.queries))


def _read_models(models: Sequence[str], cameras: Mapping[str, str], ask: Ask) -> list[dict[str, Any]]:
    """The keys of each query, with a comment under the key `#`."""
    if not cameras or not models:
        missing = "--camera NAME=SOURCE" if not cameras else "--model FILE.onnx"
        raise InputError("gemel init", f"no {missing} is given", "give one or more")
    pairs = [_split_model(text, cameras) for text in models]
    names = name_files([path for path, _ in pairs], MODEL_FILES)
    queries = []
    for (name, path), (_, camera) in zip(names.items(), pairs, strict=True):
        chosen = camera or (name if name in cameras else next(iter(cameras)) if len(cameras) == 1 else "")
        if chosen not in cameras:
            problem = f"no camera '{chosen}'" if chosen else f"nothing says which camera {path} looks at"
            raise InputError("--model", problem, f"write {path.name}@CAMERA with one of: {join_names(cameras)}")
        queries.append({"id": name, "camera": chosen, "model": str(path), **_describe_model(path, ask)})
    return queries


def _split_model(text: str, cameras: Mapping[str, str]) -> tuple[Path, str]:
    file, sign, camera = text.rpartition("@")
    if sign and (camera in cameras or file.lower().endswith(MODEL_FILES)):
        return Path(file).absolute(), camera
    return Path(text).absolute(), ""


def _describe_model(path: Path, ask: Ask) -> dict[str, Any]:
    """Task, classes and preprocessing, as far as the file leaves them open."""
    keys, given = dict[str, Any](), ModelFile(path)
    try:
        described = given.complete()
    except InputError as error:
        answer = ask(f"classes of {path.name} in their order, as a,b,c (empty: pass its outputs on as numbers)")
        classes = tuple(filter(None, (name.strip() for name in answer.split(","))))
        if classes:
            described = ModelFile(path, classes=classes).complete()
            keys |= {"classes": list(classes)}
        else:
            described = ModelFile(path, task="tensor").complete()  # what is wrong with the file itself is raised here
            keys |= {"task": "tensor", "agreement": "relative-error", "#": one_line(error.problem)}
    if described.preprocess() is None:
        names = " or ".join(NORMALISATIONS)
        answer = ask(f"{path.name} does not say how its frames are prepared: {names} (empty: unit, values from 0 to 1)")
        keys["preprocess"] = answer.strip() or "unit"
    return keys


def _workload_text(folder: Path, cameras: Mapping[str, str], queries: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "# The queries and cameras of one box; paths are relative to this file. Check it: gemel inspect workload.yaml",
        f"name: {json.dumps(_name_of(folder))}",
        "accuracy_target: 0.95     # of each original's own accuracy",
        "cameras:",
    ]
    for name, source in cameras.items():
        lines.append(f"  {json.dumps(name)}: {{source: {json.dumps(source)}}}")
    lines += [
        "  # footage: [hour.mp4] in a camera's braces: an hour without labels, which trains and proves",
        "queries:",
    ]
    for query in queries:
        lines.append(f"  - id: {json.dumps(query['id'])}")
        lines += [f"    {key}: {json.dumps(value)}" for key, value in query.items() if key not in ("id", "#")]
        if "#" in query:
            lines.append(
                f"    # its outputs are passed on as numbers, since it {query['#']}; name `task` and `classes`"
            )
        source = cameras[query["camera"]]
        if is_path(source):
            lines.append(f"    data: {json.dumps(source)}    # frames like those that it sees; its own answers count")
            lines.append("    labels: none")
        else:
            lines.append("    # data: clips/NAME        # a video or folder of frames like those that it sees")
        lines.append("    # fps: 5                  # the camera's own rate unless given")
        lines.append("    # sla_ms: 1000            # a result that is older is late")
    return "\n".join(lines) + "\n"


def _name_of(folder: Path) -> str:
    kept = "".join(char for char in folder.absolute().name if char.isalnum() or char in "_-.").lstrip("._-")
    return kept[:80] or "box"


def _box_text(cameras: Mapping[str, str]) -> str:
    lines = [
        "# A box that runs the bundle of workload.yaml. `gemel run --check box.yaml` checks it.",
        f"bundle: {BUNDLE_FILE}",
        f"memory: {choose_memory()}           # of the whole process; half of the machine that wrote this",
        "cameras:",
        *(f"  {json.dumps(name)}: {{source: {json.dumps(source)}}}" for name, source in cameras.items()),
        "sinks:",
        "  - {kind: jsonl, path: results.jsonl, max_bytes: 64MiB, keep: 5}",
        "# - {kind: mqtt, host: 127.0.0.1, topic: \"gemel/{box}/{camera}/{query}\"}",
        "http: {bind: \"127.0.0.1:8080\"}   # status, metrics and the dashboard",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"
