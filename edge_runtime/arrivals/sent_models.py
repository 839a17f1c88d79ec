"""Models that clients send: each is read in a process of its own and becomes a query beside those of the bundle.

They lie in `SPOOL/models`, a bundle each, and serve from one bundle with the configured one, so that equal tensors are
stored once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from gemel import models
from gemel.edge_runtime.life.config import FOLDER_MODE, BoxConfig
from gemel.edge_runtime.life.reload import ReloadResult
from gemel.models.bundle import open_bundle, write_substituted
from gemel.models.errors import InputError, one_line
from gemel.models.files.io import describe_problem, open_atomic

CHILD = "gemel.edge_runtime.arrivals.arrival_child"
FOLDER, JOINED = "models", "joined-"
SUFFIX = ".safetensors"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MAX_MODELS = 32
TIMEOUT_S = 300.0

log = logging.getLogger("gemel.run")


def folder_of_models(config: BoxConfig) -> Path | None:
    """Where arrived models are; None where the config takes none."""
    if config.detector_port is None or not config.detector_port.accept_models or config.spool is None:
        return None
    return config.spool.path / FOLDER


def arrived_models(folder: Path) -> dict[str, Path]:
    """The bundle of each arrived model by its name."""
    return {path.stem: path for path in sorted(folder.glob(f"*{SUFFIX}")) if not path.name.startswith(JOINED)}


def join_arrived(config: BoxConfig) -> BoxConfig:
    """The config with the bundle that also holds all arrived models, written unless it is there; itself without any.

    A model of the name of one of the bundle's own queries is left out.
    """
    folder = folder_of_models(config)
    paths = {} if folder is None else arrived_models(folder)
    if folder is None or not paths:
        return config
    configured = open_bundle(config.bundle, config.factories, config.path.resolve().parent)
    names = {query.id for query in configured.queries}
    others = {name: open_bundle(path) for name, path in paths.items() if name not in names}
    digests = [configured.digest, *(bundle.digest for bundle in others.values())]
    joined = folder / f"{JOINED}{hashlib.sha256(' '.join(digests).encode()).hexdigest()[:16]}{SUFFIX}"
    if not joined.exists():
        for path in folder.glob(f"{JOINED}*"):
            path.unlink()  # a box that serves it has it open
        write_substituted(joined, configured, others)
    return replace(config, bundle=joined)


class ArrivedModels:
    """Takes models one after the other; `reload` makes the box serve them."""

    def __init__(self, config: BoxConfig, camera: str, reload: Callable[[], Future[ReloadResult]]) -> None:
        folder = folder_of_models(config)
        assert folder is not None
        self._folder, self._camera, self._reload = folder, camera, reload
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="models")

    def add(self, name: str, data: bytes) -> Future[None]:
        """Serve this ONNX file as a query of this name; the future raises InputError where that cannot be."""
        return self._pool.submit(self._add, name, data)

    def stop(self) -> None:
        """Take no more; what is being prepared is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _add(self, name: str, data: bytes) -> None:
        where = f"the model '{name:.60}'"
        if NAME.fullmatch(name) is None or name.startswith(JOINED):
            raise InputError(where, "its name is no query's", "use letters, digits, '.', '_' and '-'")
        with describe_problem(self._folder):
            self._folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
        present = arrived_models(self._folder)
        if name in present:
            return  # it came while this one waited
        if len(present) >= MAX_MODELS:
            problem = f"the box has {MAX_MODELS} models that arrived"
            raise InputError(where, problem, f"remove some of {self._folder} and reload")
        source, target = self._folder / f".{name}.onnx", self._folder / f"{name}{SUFFIX}"
        try:
            with open_atomic(source, overwrite=True) as file:
                file.write(data)
            self._read(where, source, name, target)
        finally:
            source.unlink(missing_ok=True)
        reason = self._reload().result().reason
        if reason is not None:
            target.unlink(missing_ok=True)
            raise InputError(where, f"cannot be served: {reason}", "")
        log.info("the model %s arrived and is served", name)

    def _read(self, where: str, source: Path, name: str, target: Path) -> None:
        root = Path(models.__file__).parent.parent.parent  # the folder that holds gemel/
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", CHILD, str(source.absolute()), name, self._camera, str(target.absolute())]
        try:
            done = subprocess.run(
                command, cwd=self._folder, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise InputError(where, f"was not read within {TIMEOUT_S:.0f} s", "") from error
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise InputError(where, one_line(lines[-1])[:300], "export it to ONNX again")
