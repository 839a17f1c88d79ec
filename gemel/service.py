"""A box as a systemd service: its unit, and the request to reload its config. Imports no torch."""

from __future__ import annotations

import http.client
import os
import pwd
import re
import ssl
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from gemel.edge_runtime.http.auth import Access, TlsFiles, parse_access
from gemel.edge_runtime.life.config import BoxConfig
from gemel.edge_runtime.life.variables import NAMED, Variables
from gemel.edge_runtime.updates.update_files import UpdateFolder
from gemel.edge_runtime.updates.updater import roll_back_files
from gemel.models.errors import InputError, LockedError, one_line
from gemel.models.files.documents import ParseError, parse_json
from gemel.models.files.io import is_readable_by_others, locked_folder, open_atomic, read_bounded, read_mapping

MAX_BYTES = 1 << 16
UNIT_PATH, STATE_FOLDER = Path("/etc/systemd/system/gemel.service"), Path("/var/lib")
UNIT_MARK = "# Written by `gemel service install`, which may write it again."
RELOAD_TIMEOUT_S = 600.0
"""A box may compile engines before it answers."""
DEFAULT_BIND = "127.0.0.1:8080"
MEMORY_BYTES, MEMORY_BYTES_OF_CAMERA = 3 * 2**30, 128 * 2**20
"""Beside weights: libraries, waiting frames and bodies, engines that are built; and the decoder of each camera."""
TASKS, TASKS_OF_CAMERA = 512, 64
"""Threads, which systemd counts as tasks: a decoder has as many as the machine has cores."""
ROOT_HOME, USER_HOMES = Path("/root"), (Path("/home"), Path("/run/user"))


@dataclass(frozen=True, slots=True)
class ServiceAccount:
    """The user that a service runs as: `name` is None for a new system user, which owns nothing."""

    name: str | None

    def can_read(self, path: Path) -> bool:
        """Whether this user can read a file or folder; True where there is none, which the box itself reports."""
        return self._is_permitted(path, stat.S_IROTH)

    def can_write(self, folder: Path) -> bool:
        """Whether this user can make files in a folder."""
        return self._is_permitted(folder, stat.S_IWOTH)

    def _is_permitted(self, path: Path, right_of_others: int) -> bool:
        try:
            status = path.stat()
            user = None if self.name is None else pwd.getpwnam(self.name)
        except (OSError, KeyError):  # an unknown user may be made later
            return True
        if user is None:
            return bool(status.st_mode & right_of_others)
        if user.pw_uid == 0:
            return True
        if status.st_uid == user.pw_uid:
            return bool(status.st_mode & right_of_others << 6)
        is_member = status.st_gid in os.getgrouplist(user.pw_name, user.pw_gid)
        return bool(status.st_mode & (right_of_others << 3 if is_member else right_of_others))


def install_unit(
    config: BoxConfig, path: Path = UNIT_PATH, user: str | None = None, environment: Path | None = None
) -> list[str]:
    """Write the unit to `path`, over an older unit of Gemel only; InputError where it cannot be written.

    Returns what would still keep the box from serving, one line each.
    """
    account = ServiceAccount(user or find_owner(config.path))
    text = render_unit(config, account, environment)
    if os.path.lexists(path) and not read_bounded(path, MAX_BYTES, "name another file").startswith(UNIT_MARK.encode()):
        raise InputError(path, "was not written by Gemel", "move it away, or name another file with -o")
    with open_atomic(path, overwrite=True) as file:
        file.write(text.encode())
    path.chmod(0o644)
    warnings = [
        *_missing_variables(config, environment),
        *_inaccessible_paths(config, account, path.stem),
        *_whole_homes(config),
    ]
    if environment is not None and is_readable_by_others(environment):
        warnings.append(f"{environment} can be read by every user of this machine: chmod 600 {environment.name}")
    return warnings


def find_owner(path: Path) -> str | None:
    """The user that owns a file; None for root and for an unknown user."""
    try:
        number = path.stat().st_uid
        return pwd.getpwuid(number).pw_name if number else None
    except (OSError, KeyError):
        return None


def render_unit(config: BoxConfig, account: ServiceAccount, environment: Path | None = None) -> str:
    """The unit (gemel.service.in) that runs this config.

    The service may write only to the folders of results, ledger and trace, and sees of homes only what it needs.
    systemd hands it the secrets that its user cannot read. `environment` is a file of NAME=VALUE lines.
    """
    user = account.name
    if user is not None and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}", user) is None:
        raise InputError(config.path, f"'{user}' is not a user name", "give an existing user", "--user")
    path = config.path.resolve()
    needs_devices = config.device != "cpu" or any(
        camera.is_device or camera.decode not in ("auto", "cpu") for camera in config.cameras.values()
    )
    writable = _writable_folders(config)
    read_only = [folder for folder in _readable_folders(config) if folder not in writable]
    credentials = _credentials(config, account)
    return (files("gemel") / "gemel.service.in").read_text().format(
        mark=UNIT_MARK,
        name=_escape(path.name),
        python=f'"{_escape(sys.executable)}"'.replace("$", "$$"),
        config=f'"{_escape(path)}"'.replace("$", "$$"),
        folder=_escape(path.parent),
        user="DynamicUser=yes" if user is None else f"User={user}",
        environment="" if environment is None else f"EnvironmentFile={_escape(environment.resolve())}\n",
        credentials="".join(f"LoadCredential={key}:{_escape(file)}\n" for key, file in credentials.items()),
        mounts="".join(f'RequiresMountsFor="{_escape(folder)}"\n' for folder in _needed_folders(config)),
        homes=_render_binds("BindReadOnlyPaths", read_only) + _render_binds("BindPaths", writable),
        writable="".join(f'ReadWritePaths="{_escape(folder)}"\n' for folder in writable),
        devices="SupplementaryGroups=video" if needs_devices else "PrivateDevices=yes",
        memory_bytes=bound_memory(config.budget_bytes, len(config.cameras)),
        tasks=TASKS + TASKS_OF_CAMERA * len(config.cameras),
    )  # fmt: skip


def bound_memory(budget_bytes: int, cameras: int) -> int:
    """The bytes at which the system ends a box that runs wild: far above what one of this budget needs."""
    return 2 * budget_bytes + MEMORY_BYTES + MEMORY_BYTES_OF_CAMERA * cameras


def read_variables(environment: Path) -> dict[str, str]:
    """The variables that a file of NAME=VALUE lines sets, as systemd reads it."""
    text = read_bounded(environment, MAX_BYTES, "name a file of lines NAME=VALUE").decode(errors="replace")
    return {
        name: value.strip().strip("\"'") for name, value in re.findall(r"^\s*([A-Za-z_]\w*)=(.*)$", text, re.MULTILINE)
    }


def reload_box(config: str | Path, timeout_s: float = RELOAD_TIMEOUT_S) -> dict[str, Any]:
    """Ask the running box of this config, over HTTP, to apply it; returns `applied` and the `reason` where it was not.

    `applied` is "partly" where queries keep their old weights, which `held_back` names.

    Only `http` of the config is read. Raises InputError where it has no `http` or no token, where no box answers, or
    where the token is refused.
    """
    return _ask_box(Path(config), "/api/reload", timeout_s)


def roll_back(config: str | Path, timeout_s: float = RELOAD_TIMEOUT_S) -> dict[str, Any]:
    """Let the bundle before the last update serve again, by HTTP where the box runs, else on its files.

    Only `bundle`, `spool` and `http` of the config are read. Returns `applied` and the `reason` where it was not.
    Raises InputError as `reload_box`, and for a box without updates.
    """
    path = Path(config)
    document = read_mapping(path, "box config", "`bundle:`, `memory:` and `cameras:`")
    keys = Variables(path, os.environ).fill({key: document.get(key) for key in ("bundle", "spool")})
    spool = keys["spool"].get("path") if isinstance(keys["spool"], Mapping) else keys["spool"]
    if not isinstance(spool, str) or not isinstance(keys["bundle"], str) or document.get("updates") is None:
        problem = "its bundles come from no server, so that no update has replaced one"
        raise InputError(path, problem, "install another by hand, and `gemel reload`", "updates")
    root = path.resolve().parent
    files = UpdateFolder(root / spool, root / keys["bundle"])
    try:
        with locked_folder(root / spool):
            roll_back_files(files)
    except LockedError:
        return _ask_box(path, "/api/rollback", timeout_s)
    except InputError as error:
        return {"applied": False, "reason": str(error)}
    return {"applied": True, "reason": None}


def _ask_box(path: Path, address: str, timeout_s: float) -> dict[str, Any]:
    access = _read_access(path)
    where = f"{access.host}:{access.port}"
    # A box that listens on all addresses answers at the loopback.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(access.host, access.host)
    connection = _connection(access, host, timeout_s)
    try:
        connection.request("POST", address, headers={"Authorization": f"Bearer {access.token}"})
        response = connection.getresponse()
        body = response.read(MAX_BYTES)
    except (OSError, http.client.HTTPException) as error:
        problem = f"no box answers at {where}: {str(error) or type(error).__name__}"
        raise InputError(path, problem, "start it with `gemel run`", "http") from error
    finally:
        connection.close()
    if response.status == 200:
        try:
            held_back = [one_line(query) for query in parse_json(body).get("held_back", [])]
        except (ParseError, AttributeError, TypeError):
            held_back = []
        if held_back:
            return {"applied": "partly", "reason": None, "held_back": held_back}
        return {"applied": True, "reason": None}
    if response.status == 409:
        try:
            reason = one_line(parse_json(body)["reason"])
        except (ParseError, KeyError, TypeError):
            reason = "the box gives no reason"
        return {"applied": False, "reason": reason}
    problem = f"the box at {where} answers {response.status}: {one_line(body[:200].decode(errors='replace'))}"
    raise InputError(path, problem, "give the token that the box was started with", "http.token_file")


def _connection(access: Access, host: str, timeout_s: float) -> http.client.HTTPConnection:
    """A connection to the box; with TLS the box must have exactly the certificate of the config."""
    if access.tls is None:
        return http.client.HTTPConnection(host, access.port, timeout=timeout_s)
    try:
        context = ssl.create_default_context(cafile=os.fspath(access.tls.cert))
    except OSError as error:
        raise InputError(access.tls.cert, "cannot be read as a certificate", "give a PEM file", "http.tls") from error
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False  # the name is that of the box in its network, not of the loopback
    return http.client.HTTPSConnection(host, access.port, timeout=timeout_s, context=context)


def _read_access(path: Path) -> Access:
    given = read_mapping(path, "box config", "`bundle:`, `budget:` and `cameras:`").get("http")
    keys = Variables(path, os.environ).fill(given if isinstance(given, Mapping) else {}, "http")
    bind, token_file = keys.get("bind", DEFAULT_BIND), keys.get("token_file")
    if not isinstance(bind, str) or not isinstance(token_file, str):
        problem = "a box that runs takes this by HTTP, with a token"
        raise InputError(path, problem, "give it `http: {token_file: ...}`, or send the process SIGHUP", "http")
    root, tls = path.resolve().parent, keys.get("tls")
    files = TlsFiles(root / str(tls.get("cert")), root / str(tls.get("key"))) if isinstance(tls, Mapping) else None
    return parse_access(bind, root / token_file, path, tls=files)


def _writable_folders(config: BoxConfig) -> list[Path]:
    folders = [path.parent for path in (config.trace, *(getattr(sink, "path", None) for sink in config.sinks)) if path]
    if config.spool is not None:
        folders.append(config.spool.path if config.spool.path.is_dir() else config.spool.path.parent)
    if config.clips is not None:
        folders.append(config.clips.path if config.clips.path.is_dir() else config.clips.path.parent)
    if config.updates is not None:
        folders.append(config.bundle.parent)
    return list(dict.fromkeys(path.resolve() for path in folders))


def _needed_folders(config: BoxConfig) -> list[Path]:
    """Folders whose disks must be mounted before the service starts."""
    paths = (config.path, config.bundle, *_secret_files(config).values())
    return list(dict.fromkeys([*(path.resolve().parent for path in paths), *_writable_folders(config)]))


def _secret_files(config: BoxConfig) -> dict[str, Path]:
    """The files of `edge_runtime.life.credentials.SECRET_KEYS` by the key of the config that names them."""
    paths: dict[str, Path | None] = {"http.token_file": config.token_file, "public_key": config.public_key}
    if config.updates is not None:
        paths["updates.public_key"] = config.updates.public_key
    tls = {"http": None if config.http is None else config.http.tls}
    tls |= {f"sinks.{index}": getattr(sink, "tls", None) for index, sink in enumerate(config.sinks)}
    for key, given in tls.items():
        paths |= {f"{key}.tls.{name}": getattr(given, name, None) for name in ("cert", "key")}
    return {key: path for key, path in paths.items() if path is not None}


def _credentials(config: BoxConfig, account: ServiceAccount) -> dict[str, Path]:
    """The secret files that systemd hands over, as the user cannot read them; a certificate goes with its key."""
    paths = {key: path.resolve() for key, path in _secret_files(config).items()}
    unreadable = {key for key, path in paths.items() if not account.can_read(path)}
    return {key: path for key, path in paths.items() if key in unreadable or key.replace("cert", "key") in unreadable}


def _readable_folders(config: BoxConfig) -> list[Path]:
    """Folders that the service reads: whole ones, as files are replaced by others of the same name."""
    clips = [Path(camera.source) for camera in config.cameras.values() if not camera.live]
    folders = [clip if clip.is_dir() else clip.parent for clip in clips]
    python = [Path(path) for path in (sys.prefix, sys.base_prefix, *sys.path) if path and Path(path) != Path.cwd()]
    folders += [*_needed_folders(config), Path(__file__).parent.parent, *python]
    return list(dict.fromkeys(folder.resolve() for folder in folders if folder.is_dir()))


def _render_binds(key: str, folders: list[Path]) -> str:
    """A line for each folder below a home: the service sees nothing else of these."""
    inside = [folder for folder in folders if _home_of(folder) is not None]
    if key == "BindReadOnlyPaths":
        inside = [folder for folder in inside if not any(parent in inside for parent in folder.parents)]
    return "".join(f'{key}="{_escape(folder)}"\n'.replace(":", "\\:") for folder in inside)


def _home_of(folder: Path) -> Path | None:
    """The home that a folder is or lies in."""
    for place in (folder, *folder.parents):
        if place in (ROOT_HOME, *USER_HOMES) or place.parent in USER_HOMES:
            return place
    return None


def _whole_homes(config: BoxConfig) -> Iterator[str]:
    for folder in [*_readable_folders(config), *_writable_folders(config)]:
        if folder == _home_of(folder):
            yield f"{folder}: the service sees all of this home; give the box a folder of its own"


def _missing_variables(config: BoxConfig, environment: Path | None) -> Iterator[str]:
    text = read_bounded(config.path, MAX_BYTES, "give an existing box config").decode(errors="replace")
    known = {} if environment is None else read_variables(environment)
    if missing := sorted(set(NAMED.findall(text)) - known.keys()):
        yield f"a service has no {', '.join(missing)} in its environment; name a file that sets it: --environment FILE"


def _inaccessible_paths(config: BoxConfig, account: ServiceAccount, unit: str) -> Iterator[str]:
    """What the service's user can neither write nor read, and systemd does not hand over."""
    state = STATE_FOLDER / unit
    for folder in _writable_folders(config):
        if state not in (folder, *folder.parents) and not account.can_write(folder):
            yield f"{folder}: the service's user cannot write there; write below {state}, or give it a --user"
    clips = [Path(camera.source) for camera in config.cameras.values() if not camera.live]
    for path in (config.path, config.bundle, *clips):
        if not account.can_read(path):
            yield f"{path}: the service's user cannot read it; give it a --user who can"


def _escape(text: str | Path) -> str:
    """Text for one line of a unit: without quotes, specifiers escaped."""
    text = os.fspath(text)
    if not text.isprintable() or '"' in text or "\\" in text:
        raise InputError(text, "cannot be written in a systemd unit", "give it a plain name", "config")
    return text.replace("%", "%%")
