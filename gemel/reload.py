"""Asks a running box, over HTTP, to take up its config and bundle as they are now; imports no torch."""

from __future__ import annotations

import http.client
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_runtime.http.auth import Access, parse_access
from edge_runtime.variables import Variables
from models.errors import InputError, one_line
from models.io import parse_json, read_mapping

TIMEOUT_S = 600.0
"""How long a box may check what it is to serve: it may make engines for it."""
MAX_BYTES = 1 << 16
DEFAULT_BIND = "127.0.0.1:8080"


def reload_box(config: str | Path, patience_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Ask the box of this config; `applied`, and the `reason` where it was not.

    Of the config only `http` is read here: all else is for the box to judge. Raises InputError where it has no `http`
    or no token, where no box answers, or where that does not take the token.
    """
    path = Path(config)
    access = _access(path)
    where = f"{access.host}:{access.port}"
    connection = http.client.HTTPConnection(_reached(access.host), access.port, timeout=patience_s)
    try:
        connection.request("POST", "/api/reload", headers={"Authorization": f"Bearer {access.token}"})
        answer = connection.getresponse()
        body = answer.read(MAX_BYTES)
    except (OSError, http.client.HTTPException) as error:
        said = str(error) or type(error).__name__
        raise InputError(path, f"no box answers at {where}: {said}", "start it with `gemel run`", "http") from error
    finally:
        connection.close()
    if answer.status == 200:
        return {"applied": True, "reason": None}
    if answer.status == 409:
        return {"applied": False, "reason": _reason(body)}
    fault = f"the box at {where} answers {answer.status}: {one_line(body[:200].decode(errors='replace'))}"
    raise InputError(path, fault, "give the token that it was started with", "http.token_file")


def _access(path: Path) -> Access:
    """How the box of this config is reached."""
    given = read_mapping(path, "box config", "`bundle:`, `budget:` and `cameras:`").get("http")
    keys = Variables(path, os.environ).filled(given if isinstance(given, Mapping) else {}, "http")
    bind, token_file = keys.get("bind", DEFAULT_BIND), keys.get("token_file")
    if not isinstance(bind, str) or not isinstance(token_file, str):
        fault = "a box is asked over HTTP, with its token"
        raise InputError(path, fault, "give it `http: {token_file: ...}`, or send the process SIGHUP", "http")
    return parse_access(bind, path.resolve().parent / token_file, path)


def _reached(host: str) -> str:
    """A box that listens on every address is reached on this machine's own."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    return ("127.0.0.1" if address.version == 4 else "::1") if address.is_unspecified else host


def _reason(body: bytes) -> str:
    try:
        return one_line(parse_json(body)["reason"])
    except (ValueError, KeyError, TypeError):
        return "the box does not say why"
