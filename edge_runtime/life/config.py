"""The box config: YAML at the edge, checked key by key, frozen values inside."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from gemel.edge_runtime.capture.sources import PUSH, TIMEOUT_S, CameraConfig
from gemel.edge_runtime.engines.base import AUTO, ENGINES, FALLBACK, FULL, ONNX
from gemel.edge_runtime.engines.providers import has_cuda_provider
from gemel.edge_runtime.events.clips import ClipConfig
from gemel.edge_runtime.events.rules import QueryRules, RulesByQuery
from gemel.edge_runtime.http.auth import Access, TlsFiles, is_loopback, parse_access
from gemel.edge_runtime.life.credentials import use_credentials
from gemel.edge_runtime.life.variables import Variables
from gemel.edge_runtime.policies import DEFAULT_POLICY, policy_named
from gemel.edge_runtime.scheduler.costs import parse_memory
from gemel.edge_runtime.sinks.base import SinkConfig, check_authorities, host_name, parse_sinks
from gemel.models.errors import Faults, InputError, join_names
from gemel.models.files.extras import has_cuda, is_installed
from gemel.models.files.io import MAX_CAMERAS, Fps, Name, PathText, is_path, read_mapping, validate
from gemel.models.plugins import read_options, split_options

CLIP_BYTES = "1GiB"
SPOOL_BYTES, SPOOL_INTERVAL_S = "256MiB", 60.0
SAMPLES = "samples"
FOLDER_MODE, FILE_MODE = 0o700, 0o600
FRAMES, ACCURACY = "frames", "accuracy"
"""Objectives of a schedule."""


@dataclass(frozen=True, slots=True)
class SpoolConfig:
    """The absolute folder `path`, with at most `max_bytes` of samples, one of each query every `every_s` seconds."""

    path: Path
    max_bytes: int
    every_s: float

    @property
    def samples(self) -> Path:
        """The folder of the samples."""
        return self.path / SAMPLES


@dataclass(frozen=True, slots=True)
class UpdateConfig:
    """Where updates of the bundle come from: a file on a server.

    The box asks the server every `every_s` seconds, with a `token` where there is one. A new bundle has to prove itself
    for `watch_s` seconds. `ca` are the authorities that HTTPS trusts in place of the system's.
    """

    url: str
    public_key: Path
    every_s: float = 600.0
    watch_s: float = 600.0
    token: str | None = field(default=None, repr=False)
    ca: Path | None = None


RUN_SHARE = 0.75
"""Of the timeout of a client of `zmq`."""


@dataclass(frozen=True, slots=True)
class DetectorPortConfig:
    """The address at which Frigate's detector `zmq` is answered, whether models that it sends are taken, and the
    milliseconds after which it takes an answer for none (its `request_timeout_ms`)."""

    bind: str
    accept_models: bool = False
    timeout_ms: float = 200.0

    @property
    def run_within_s(self) -> float:
        """The deadline of a tensor in the schedule: what is left of the timeout is for its way, and the answer's."""
        return RUN_SHARE * self.timeout_ms / 1000

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        return not self.bind.startswith("tcp://") or is_loopback(urlsplit(self.bind).hostname or "")


@dataclass(frozen=True, slots=True)
class BoxConfig:
    """The config of one box, with absolute paths; `name` is the host's where the file has none.

    `device` is cpu or cuda, `engine` a name of ENGINES or auto, `engine_options` what its class takes. With `late` =
    drop a late result is only counted, not sent. `objective` of the policy `adaptive` is frames in time, or accuracy
    over time by the staleness curves of the bundle's profile; None for accuracy where there are curves. With `overflow`
    a query too large for the budget copies the rest in every run. `trace` is the file that records states and
    decisions. With a `public_key` the bundle must be signed. With `canary` a reload tries new weights on samples of the
    spool before they serve. `rules` are those of queries that have any. With `clips` the clips and snapshots of events
    are kept.
    """

    path: Path
    bundle: Path
    budget_bytes: int
    device: str
    engine: str
    cameras: dict[str, CameraConfig]
    sinks: tuple[SinkConfig, ...]
    spool: SpoolConfig | None
    factories: tuple[str, ...]
    public_key: Path | None
    http: Access | None
    token_file: Path | None
    policy: str
    trace: Path | None
    overflow: bool
    late: str
    canary: bool
    name: str
    objective: str | None = None
    updates: UpdateConfig | None = None
    memory_bytes: int | None = None
    """Of the whole process; `budget_bytes` are those of weights and workspaces, at most as many."""
    configured_bundle: Path | None = None
    """The bundle that the file names, where `bundle` is another: one with queries held back."""
    rules: dict[str, QueryRules] = field(default_factory=dict)
    clips: ClipConfig | None = None
    engine_options: dict[str, Any] = field(default_factory=dict)
    detector_port: DetectorPortConfig | None = None

    @property
    def event_kinds(self) -> dict[str, dict[str, str]]:
        """The kinds of each query's events by name."""
        return {query: {event.name: str(event.kind) for event in own.events} for query, own in self.rules.items()}


def _check_host_name(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}", text) is None:
        raise ValueError("give a host name as browsers have it, such as box.example.org, without scheme, port and path")
    return text


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


_Path = Annotated[str, Field(min_length=1)]
_HostName = Annotated[str, AfterValidator(_check_host_name)]
_Factory = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]


class _CameraKeys(_Strict):
    source: PathText | Annotated[int, Field(ge=0, le=999)]
    fps: Fps | None = None
    decode: str = "auto"
    skip: str = "auto"
    detect: Annotated[str, Field(min_length=1)] | None = None
    loop: bool = False
    timeout_s: Annotated[float, Field(ge=0.1, le=3600)] = TIMEOUT_S
    every_s: Annotated[float, Field(ge=0.05, le=3600)] | None = None


class _TlsKeys(_Strict):
    cert: _Path
    key: _Path


class _HttpKeys(_Strict):
    bind: str = "127.0.0.1:8080"
    token_file: _Path | None = None
    names: Annotated[list[_HostName], Field(max_length=100)] = []
    trusted_proxies: Annotated[list[str], Field(max_length=100)] = []
    tls: _TlsKeys | None = None
    ready: Literal["any", "all"] = "any"


class _UpdateKeys(_Strict):
    url: Annotated[str, Field(pattern=r"^https?://[!-~]+$")]
    public_key: _Path
    every_s: Annotated[float, Field(ge=1, le=604_800)] = 600.0
    watch_s: Annotated[float, Field(ge=1, le=604_800)] = 600.0
    token: Annotated[str, Field(pattern=r"^[!-~]{1,1024}$")] | None = None
    ca: _Path | None = None

    @model_validator(mode="after")
    def _check_address(self) -> _UpdateKeys:
        url = urlsplit(self.url)
        if "@" in url.netloc:
            raise ValueError("`url` names a user: give a `token` instead, which is sent as a header")
        check_authorities(self.ca, self.url)
        return self


class _SpoolKeys(_Strict):
    path: _Path
    max_bytes: str | int = SPOOL_BYTES
    every_s: Annotated[float, Field(ge=0.01, le=604_800)] = SPOOL_INTERVAL_S


class _ClipKeys(_Strict):
    path: _Path
    max_bytes: str | int = CLIP_BYTES
    before_s: Annotated[float, Field(ge=0, le=30)] = 5.0
    after_s: Annotated[float, Field(ge=0, le=30)] = 5.0


def _port_keys(given: Any) -> Any:
    """An address alone takes no models."""
    return {"bind": given} if isinstance(given, str) else given


def _spool_keys(given: Any) -> Any:
    """A path alone has the defaults."""
    return {"path": given} if isinstance(given, str) else given


class _DetectorPortKeys(_Strict):
    bind: Annotated[str, Field(pattern=r"^(tcp://(\[[0-9a-fA-F:]+\]|[\w.*-]+):[0-9]{1,5}|ipc:///.{1,90})$")]
    accept_models: bool = False
    timeout_ms: Annotated[float, Field(ge=10, le=60_000)] = 200.0


class _BoxKeys(_Strict):
    bundle: _Path
    name: Name | None = None
    budget: str | int | None = None
    memory: str | int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    engine: str = AUTO
    provider: str = AUTO
    precision: str = FULL
    cameras: Annotated[dict[Name, _CameraKeys], Field(min_length=1, max_length=MAX_CAMERAS)]
    sinks: Annotated[list[dict[str, Any]], Field(min_length=1)] = [{"kind": "jsonl"}]
    http: _HttpKeys | None = None
    public_key: _Path | None = None
    spool: Annotated[_SpoolKeys, BeforeValidator(_spool_keys)] | None = None
    clips: Annotated[_ClipKeys, BeforeValidator(_spool_keys)] | None = None
    canary: bool = True
    factories: list[_Factory] = []
    policy: str = DEFAULT_POLICY
    trace: _Path | None = None
    overflow: bool = False
    late: Literal["drop", "publish"] = "publish"
    objective: Literal["frames", "accuracy"] | None = None
    updates: _UpdateKeys | None = None
    queries: RulesByQuery = {}
    zmq: Annotated[_DetectorPortKeys, BeforeValidator(_port_keys)] | None = None


def torch_device(path: Path, device: str) -> str:
    """The device that torch would use here for `auto`, `cpu` or `cuda`; InputError where it has none such.

    Where torch is not installed, ONNX Runtime may have a GPU.
    """
    if device == "cpu":
        return device
    if has_cuda() or has_cuda_provider():
        return "cuda"
    if device == "cuda":
        raise InputError(path, "this machine has no CUDA device that torch can use", "use auto or cpu", "device")
    return "cpu"


def any_device(_: Path, device: str) -> str:
    """The device as written, for callers that only read a config, without torch."""
    return device


def load_config(
    path: str | Path,
    environment: Mapping[str, str] = os.environ,
    device_of: Callable[[Path, str], str] = torch_device,
) -> BoxConfig:
    """Read a box config. Paths are relative to the file; `${NAME}` in any string is taken from the environment.

    Files with secrets are those of `$CREDENTIALS_DIRECTORY` where it has them (`edge_runtime.life.credentials`).
    Raises InputError, naming the file and the key, for an unknown key, a wrong value, a name that the environment
    lacks, and a device that this machine lacks. No message holds a value of the environment.
    """
    path = Path(path)
    written = read_mapping(path, "box config", "`bundle:`, `memory:` and `cameras:`")
    variables = Variables(path, environment)
    try:
        document = variables.fill(written)
        use_credentials(document, environment)
        return _config(path, validate(path, document, _BoxKeys), device_of)
    except InputError as error:
        raise variables.mask(error) from None


def _config(path: Path, keys: _BoxKeys, device_of: Callable[[Path, str], str]) -> BoxConfig:
    """The config of keys that fit the schema; InputError with everything that does not fit together."""
    root, faults = path.resolve().parent, Faults()
    attempt: Any = faults.attempt
    http = attempt(lambda: None if keys.http is None else _access(path, root, keys.http))
    engine, engine_options = attempt(lambda: _engine(path, keys)) or (AUTO, {})
    attempt(lambda: _check_pushed(path, keys))
    attempt(lambda: policy_named(keys.policy, str(path), "policy"))
    budget = attempt(lambda: _budget(path, keys))
    cameras = {name: attempt(partial(_camera, path, root, name, given)) for name, given in keys.cameras.items()}
    config = BoxConfig(
        path=path,
        bundle=root / keys.bundle,
        budget_bytes=budget,
        memory_bytes=None if budget is None or keys.memory is None else parse_memory(keys.memory, str(path), "memory"),
        device=attempt(lambda: device_of(path, keys.device)),
        engine=engine,
        engine_options=engine_options,
        cameras=cameras,
        sinks=attempt(lambda: parse_sinks(path, keys.sinks, root, keys.name)),
        spool=attempt(lambda: None if keys.spool is None else _spool(path, root, keys.spool)),
        public_key=None if keys.public_key is None else root / keys.public_key,
        http=http,
        token_file=None if keys.http is None or keys.http.token_file is None else root / keys.http.token_file,
        policy=keys.policy,
        trace=None if keys.trace is None else root / keys.trace,
        factories=tuple(keys.factories),
        overflow=keys.overflow,
        late=keys.late,
        canary=keys.canary,
        name=keys.name or host_name(),
        objective=keys.objective,
        configured_bundle=root / keys.bundle,
        updates=attempt(
            lambda: None if keys.updates is None else _updates(path, root, keys.updates, keys.spool is not None)
        ),
        clips=attempt(lambda: None if keys.clips is None else _clips(path, root, keys.clips)),
        rules=attempt(lambda: {name: own.to_rules() for name, own in keys.queries.items()}),
        detector_port=attempt(lambda: None if keys.zmq is None else _detector_port(path, keys)),
    )
    faults.finish()
    return config


def _engine(path: Path, keys: _BoxKeys) -> tuple[str, dict[str, Any]]:
    """The engine's name and its options; the keys `provider` and `precision` are the options of these names, too."""
    name, _, text = ENGINES.check(keys.engine, path, "engine", [AUTO]).partition(":")
    written, short = split_options(text), {"provider": keys.provider, "precision": keys.precision}
    short = {option: value for option, value in short.items() if value not in (AUTO, FULL)}
    wishes = {**short, **written}
    if not wishes:
        return name, {}
    for candidate in (ONNX, FALLBACK) if name == AUTO else (name,):
        types = ENGINES.find(candidate, path, "engine").options
        if wishes.keys() <= types.keys():
            return name, {
                **read_options(candidate, types, short, path), **read_options(candidate, types, written, path, "engine")
            }  # fmt: skip
    unknown = next((option for option in wishes if option not in types), next(iter(wishes)))
    problem = f"the engine {name} has no option {unknown}" if name != AUTO else "no engine has all these options"
    hint = f"it has: {join_names(types)}" if types and name != AUTO else "leave it out"
    raise InputError(path, problem, hint, unknown if unknown in short else "engine")


def _budget(path: Path, keys: _BoxKeys) -> int:
    """The smaller of `budget` and `memory`, one of which is needed."""
    if keys.budget is None and keys.memory is None:
        problem = "says nothing of how much memory the box may take"
        raise InputError(path, problem, "add `memory: 512MiB`, for the whole process", "memory")
    given = ((keys.budget, "budget"), (keys.memory, "memory"))
    return min(parse_memory(size, str(path), key) for size, key in given if size is not None)


def _check_pushed(path: Path, keys: _BoxKeys) -> None:
    pushed = [name for name, camera in keys.cameras.items() if camera.source == PUSH]
    if pushed and (keys.http is None or keys.http.token_file is None):
        problem = f"the frames of camera {pushed[0]} come by HTTP, which needs a token"
        raise InputError(path, problem, "add `http: {token_file: token}`", "http.token_file")


def _access(path: Path, root: Path, given: _HttpKeys) -> Access:
    token_file = None if given.token_file is None else root / given.token_file
    tls = None if given.tls is None else TlsFiles(root / given.tls.cert, root / given.tls.key)
    return parse_access(given.bind, token_file, path, given.names, given.trusted_proxies, tls, given.ready)


def _detector_port(path: Path, keys: _BoxKeys) -> DetectorPortConfig:
    assert keys.zmq is not None
    if not is_installed("zmq"):
        raise InputError(path, "needs pyzmq, which is not installed", "pip install 'gemel[zmq]'", "zmq")
    if all(camera.source != PUSH for camera in keys.cameras.values()):
        raise InputError(path, "no camera takes frames that are sent", "add one with `source: push`", "zmq")
    if keys.zmq.accept_models:
        _check_arrivals(path, keys)
    return DetectorPortConfig(keys.zmq.bind, keys.zmq.accept_models, keys.zmq.timeout_ms)


def _check_arrivals(path: Path, keys: _BoxKeys) -> None:
    key = "zmq.accept_models"
    if keys.spool is None:
        raise InputError(path, "models that arrive are kept in a spool, and there is none", "add `spool: spool`", key)
    if keys.public_key is not None:
        raise InputError(path, "models that arrive are not signed", "leave it or `public_key` out", key)
    if sum(camera.source == PUSH for camera in keys.cameras.values()) > 1:
        raise InputError(path, "models that arrive have one camera", "leave one with `source: push`", key)
    if not is_installed("torchvision"):
        raise InputError(path, "reading models needs torch", "pip install 'gemel[merge]'", key)


def _updates(path: Path, root: Path, given: _UpdateKeys, has_spool: bool) -> UpdateConfig:
    if not has_spool:
        problem = "the bundle before an update is kept in a spool, and there is none"
        raise InputError(path, problem, "add `spool: spool`", "updates")
    ca = None if given.ca is None else root / given.ca
    return UpdateConfig(given.url, root / given.public_key, given.every_s, given.watch_s, given.token, ca)


def _spool(path: Path, root: Path, given: _SpoolKeys) -> SpoolConfig:
    folder = root / given.path
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise InputError(path, f"{folder} is no directory", "name another folder", "spool.path")
    return SpoolConfig(folder, parse_memory(given.max_bytes, str(path), "spool.max_bytes"), given.every_s)


def _clips(path: Path, root: Path, given: _ClipKeys) -> ClipConfig:
    folder = root / given.path
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise InputError(path, f"{folder} is no directory", "name another folder", "clips.path")
    max_bytes = parse_memory(given.max_bytes, str(path), "clips.max_bytes")
    return ClipConfig(folder, max_bytes, given.before_s, given.after_s)


def _camera(path: Path, root: Path, name: str, given: _CameraKeys) -> CameraConfig:
    text = str(given.source)
    source = str(root / text) if is_path(text) and text != PUSH else _lower_scheme(text)
    fps = given.fps or (1 / given.every_s if given.every_s else None)
    detect = None if given.detect is None else _lower_scheme(given.detect)
    camera = CameraConfig(
        name, source, fps, given.loop, given.decode, given.timeout_s, given.every_s, given.skip, detect
    )
    if found := camera.problem():
        key, problem, hint = found
        raise InputError(path, problem, hint, f"cameras.{name}.{key}")
    return camera


def _lower_scheme(address: str) -> str:
    scheme, separator, rest = address.partition("://")
    return scheme.lower() + separator + rest
