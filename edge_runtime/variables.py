"""`${NAME}` in the strings of a document, filled in from the environment; what was filled in is not to be shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.errors import InputError

MIN_CLIPPED = 32
"""Characters of a long value that an error shows at least."""
NAMED = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class Variables:
    """Fills in the values of an environment, and remembers which, so that `masked` can take them out of a message."""

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        self._path, self._environment = path, environment
        self._used: dict[str, str] = {}

    def filled(self, document: Any, key: str = "") -> Any:
        """The document (of mappings, lists and values) with every `${NAME}` in its strings replaced.

        Raises InputError naming the key of a name that the environment lacks.
        """
        if isinstance(document, str):
            return NAMED.sub(lambda found: self._value(found[1], key), document)
        if isinstance(document, dict):
            return {name: self.filled(value, f"{key}.{name}" if key else str(name)) for name, value in document.items()}
        if isinstance(document, list):
            return [self.filled(value, f"{key}[{index}]") for index, value in enumerate(document)]
        return document

    def masked(self, error: InputError) -> InputError:
        """The same error with the names where it has their values."""
        return InputError(error.where, self._without(error.problem), self._without(error.hint), error.key)

    def _value(self, name: str, key: str) -> str:
        value = self._environment.get(name)
        if value is None:
            raise InputError(self._path, f"the environment has no {name}", "set it, or write the value here", key)
        self._used[name] = value
        return value

    def _without(self, text: str) -> str:
        for name, value in sorted(self._used.items(), key=lambda item: -len(item[1])):
            for shown in {value, repr(value)[1:-1]} - {""}:
                cut = (
                    re.escape(shown[MIN_CLIPPED:]) if len(shown) <= MIN_CLIPPED else r"[^;]*"
                )  # an error may cut it off
                text = re.sub(re.escape(shown[:MIN_CLIPPED]) + cut, lambda _, name=name: f"${{{name}}}", text)
        return text
