"""The systemd unit of a box: what it may do is what its config needs."""

from __future__ import annotations

import os
import pwd
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from edge_runtime.config import BoxConfig
from edge_runtime.variables import NAMED
from models.errors import InputError
from models.io import open_atomic, read_bounded

WATCHDOG_S = 15
MAX_BYTES = 1 << 16
PLACE, STATE = Path("/etc/systemd/system/gemel.service"), Path("/var/lib")
MARK = "# Written by `gemel service install`, which may write it again."


def install(
    config: BoxConfig, path: Path = PLACE, user: str | None = None, environment: Path | None = None
) -> list[str]:
    """Write the unit to `path`, over an older one of ours alone; InputError where it cannot be.

    Returns what would keep the box from serving nevertheless, a line each.
    """
    user = user or owner_of(config.path)
    text = unit_of(config, user, environment)
    if os.path.lexists(path) and not read_bounded(path, MAX_BYTES, "name another file").startswith(MARK.encode()):
        raise InputError(path, "was not written by Gemel", "move it away, or name another file with -o")
    with open_atomic(path, overwrite=True) as file:
        file.write(text.encode())
    path.chmod(0o644)
    return [*_unset(config, environment), *([] if user else _out_of_reach(config, path.stem))]


def owner_of(path: Path) -> str | None:
    """The name of the user to whom a file belongs; None for root, and for nobody known."""
    try:
        number = path.stat().st_uid
        return pwd.getpwuid(number).pw_name if number else None
    except (OSError, KeyError):
        return None


def unit_of(config: BoxConfig, user: str | None = None, environment: Path | None = None) -> str:
    """The text of the unit that runs this config as `user`, a new one of the system's where None, with the variables of
    a file `environment`.

    It restarts what fails, but not a config that is bad; writes where results, ledger and trace go, and nowhere else.
    """
    if user is not None and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}", user) is None:
        raise InputError(config.path, f"'{user}' is no user's name", "give the name of one", "--user")
    who = "DynamicUser=yes" if user is None else f"User={user}"
    return f"""\
{MARK}
[Unit]
Description=Gemel box {_escaped(config.path.name, "config")}
Documentation=man:systemd.service(5)
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
Type=notify
ExecStart={_argument(sys.executable)} -P -m gemel run {_argument(config.path.resolve())}
ExecReload=/bin/kill -HUP $MAINPID
WorkingDirectory={_escaped(str(config.path.resolve().parent), "config")}
{who}
{"" if environment is None else f"EnvironmentFile={_escaped(str(environment.resolve()), 'environment')}" + chr(10)}\
StateDirectory=%N
CacheDirectory=%N
Environment=XDG_CACHE_HOME=%C/%N
WatchdogSec={WATCHDOG_S}
Restart=on-failure
RestartSec=1
RestartPreventExitStatus=2
TimeoutStartSec=300
TimeoutStopSec=10

{"".join(f"ReadWritePaths={_quoted(path)}" + chr(10) for path in _written(config))}\
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
PrivateMounts=yes
ProtectProc=invisible
{"SupplementaryGroups=video" if _has_devices(config) else "PrivateDevices=yes"}
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
RestrictNamespaces=yes
RestrictSUIDSGID=yes
RestrictRealtime=yes
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallErrorNumber=EPERM
UMask=0077

[Install]
WantedBy=multi-user.target
"""


def variables_of(environment: Path) -> dict[str, str]:
    """What a file of lines NAME=VALUE sets, as systemd reads it; InputError where it cannot be read."""
    text = read_bounded(environment, MAX_BYTES, "name a file of lines NAME=VALUE").decode(errors="replace")
    return {
        name: value.strip().strip("\"'") for name, value in re.findall(r"^\s*([A-Za-z_]\w*)=(.*)$", text, re.MULTILINE)
    }


def _written(config: BoxConfig) -> list[Path]:
    """The folders that a box writes in."""
    written = [path.parent for path in (config.trace, *(getattr(sink, "path", None) for sink in config.sinks)) if path]
    if config.spool is not None:
        written.append(config.spool.path if config.spool.path.is_dir() else config.spool.path.parent)
    return list(dict.fromkeys(path.resolve() for path in written))


def _has_devices(config: BoxConfig) -> bool:
    """Whether it may need a GPU, a hardware decoder or a USB camera."""
    return config.device != "cpu" or any(one.is_device or one.decoder == "gstreamer" for one in config.cameras.values())


def _unset(config: BoxConfig, environment: Path | None) -> Iterator[str]:
    """Variables of the config that the service would not have."""
    text = read_bounded(config.path, MAX_BYTES, "give an existing box config").decode(errors="replace")
    names = set(NAMED.findall(text))
    known = {} if environment is None else variables_of(environment)
    if lacking := sorted(names - known.keys()):
        yield f"a service has no {', '.join(lacking)} in its environment; name a file that sets it: --environment FILE"


def _out_of_reach(config: BoxConfig, name: str) -> Iterator[str]:
    """What a user of the system's own can neither write nor read."""
    for folder in _written(config):
        if STATE / name not in (folder, *folder.parents) and not _lets(folder, stat.S_IWOTH):
            yield f"{folder}: the box's own user cannot write there; write below {STATE / name}, or give it a --user"
    cameras = [Path(one.source) for one in config.cameras.values() if not one.live]
    for path in (config.path, config.bundle, config.public_key, config.token_file, *cameras):
        if path is not None and not _lets(path, stat.S_IROTH):
            yield f"{path}: the box's own user cannot read it; let others read it, or give it a --user"


def _lets(path: Path, others: int) -> bool:
    try:
        return bool(path.stat().st_mode & others)
    except OSError:  # not there: the box itself will say so
        return True


def _quoted(path: str | Path) -> str:
    return f'"{_escaped(os.fspath(path), "config")}"'


def _argument(path: str | Path) -> str:
    return _quoted(path).replace("$", "$$")


def _escaped(text: str, key: str) -> str:
    """A text as a unit takes it: no specifier, no quote, in one line."""
    if not text.isprintable() or '"' in text or "\\" in text:
        raise InputError(text, "cannot stand in a systemd unit", "give it a plain name", key)
    return text.replace("%", "%%")
