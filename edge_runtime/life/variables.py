"""`${NAME}` in the strings of a config, filled in from the environment; the values never appear in messages."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemel.models.errors import InputError, join_errors

MIN_CLIPPED = 32
"""Messages show at least so many characters of a long value."""
NAMED = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
LOGIN = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<user>[^/?#:]*)(?P<colon>:?)(?P<password>[^/?#]*)(?=@)")
"""The user and password of an address, up to the last @ before its host."""


class Variables:
    """Fills in the values of an environment, and masks them in messages."""

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        self._path, self._environment = path, environment
        self._used: dict[str, str] = {}

    def fill(self, document: Any, key: str = "") -> Any:
        """The document (of mappings, lists and values) with every `${NAME}` in its strings replaced.

        A value in the user or password of an address is percent-encoded, since it may hold any character; where one
        name stands for both, its first colon separates them.
        Raises InputError naming the key of a name that the environment lacks.
        """
        if isinstance(document, str):
            login = LOGIN.match(document)
            if login is None:
                return self._replace(document, key)
            user = self._replace(login["user"], key, safe="" if login["colon"] else ":")
            password = self._replace(login["password"], key, safe="")
            rest = self._replace(document[login.end() :], key)
            return login["scheme"] + user + login["colon"] + password + rest
        if isinstance(document, dict):
            return {name: self.fill(value, f"{key}.{name}" if key else str(name)) for name, value in document.items()}
        if isinstance(document, list):
            return [self.fill(value, f"{key}[{index}]") for index, value in enumerate(document)]
        return document

    def mask(self, error: InputError) -> InputError:
        """The same error, and all others of the file, with names in place of their values."""
        return join_errors([
            InputError(one.where, self._mask(one.problem), self._mask(one.hint), one.key)
            for one in (error, *error.others)
        ])  # fmt: skip

    def _replace(self, text: str, key: str, safe: str | None = None) -> str:
        """The text with its names replaced, by percent-encoded values where `safe` is the one character to leave."""

        def value_of(found: re.Match[str]) -> str:
            value = self._value(found[1], key)
            if safe is None:
                return value
            user, colon, password = value.partition(safe) if safe else (value, "", "")
            return _percent_encoded(user) + colon + _percent_encoded(password)

        return NAMED.sub(value_of, text)

    def _value(self, name: str, key: str) -> str:
        value = self._environment.get(name)
        if value is None:
            raise InputError(self._path, f"the environment has no {name}", "set it, or write the value here", key)
        self._used[name] = value
        return value

    def _mask(self, text: str) -> str:
        for name, value in sorted(self._used.items(), key=lambda item: -len(item[1])):
            for shown in {value, repr(value)[1:-1], _percent_encoded(value)} - {""}:
                rest = (
                    re.escape(shown[MIN_CLIPPED:]) if len(shown) <= MIN_CLIPPED else r"[^;]*"
                )  # a message may clip it
                text = re.sub(re.escape(shown[:MIN_CLIPPED]) + rest, lambda _, name=name: f"${{{name}}}", text)
        return text


def _percent_encoded(value: str) -> str:
    return urllib.parse.quote(value, safe="", errors="surrogateescape")
