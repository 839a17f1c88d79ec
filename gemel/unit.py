"""The systemd unit of a box: what it may do is what its config needs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from edge_runtime.config import BoxConfig
from models.errors import InputError
from models.files.atomic import writing
from models.files.bounded import read_bounded

WATCHDOG_S = 15
MOST_BYTES = 1 << 16
PLACE = Path("/etc/systemd/system/gemel.service")
MARK = "# Written by `gemel service install`, which may write it again."


def install(config: BoxConfig, path: Path = PLACE, user: str | None = None) -> None:
    """Write the unit to `path`, over an older one of ours alone; InputError where it cannot be."""
    text = unit_of(config, user)
    if os.path.lexists(path) and not read_bounded(path, MOST_BYTES, "name another file").startswith(MARK.encode()):
        raise InputError(path, "was not written by Gemel", "move it away, or name another file with -o")
    with writing(path, overwrite=True) as file:
        file.write(text.encode())
    path.chmod(0o644)


def unit_of(config: BoxConfig, user: str | None = None) -> str:
    """The text of the unit that runs this config as `user`, a new one of the system's where None.

    It restarts what fails, but not a config that is bad; writes where results, ledger and trace go, and nowhere else.
    """
    written = [path.parent for path in (config.trace, *(getattr(sink, "path", None) for sink in config.sinks)) if path]
    if config.spool is not None:
        written.append(config.spool.path if config.spool.path.is_dir() else config.spool.path.parent)
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
CacheDirectory=gemel
Environment=XDG_CACHE_HOME=%C
WatchdogSec={WATCHDOG_S}
Restart=on-failure
RestartSec=1
RestartPreventExitStatus=2
TimeoutStartSec=300
TimeoutStopSec=10

{"".join(f"ReadWritePaths={_quoted(path)}" + chr(10) for path in _unique(written))}\
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
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
SupplementaryGroups=video
UMask=0077

[Install]
WantedBy=multi-user.target
"""


def _unique(paths: Iterable[Path]) -> list[Path]:
    return list(dict.fromkeys(path.resolve() for path in paths))


def _quoted(path: str | Path) -> str:
    return f'"{_escaped(os.fspath(path), "config")}"'


def _argument(path: str | Path) -> str:
    return _quoted(path).replace("$", "$$")


def _escaped(text: str, key: str) -> str:
    """A text as a unit takes it: no specifier, no quote, in one line."""
    if not text.isprintable() or '"' in text or "\\" in text:
        raise InputError(text, "cannot stand in a systemd unit", "give it a plain name", key)
    return text.replace("%", "%%")
