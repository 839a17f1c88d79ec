"""Files with secrets that systemd hands to the service: found by the key of the config that names them.

systemd reads a file as root (`LoadCredential=KEY:PATH`) and shows it to the service alone, below the folder that
`CREDENTIALS_DIRECTORY` names: https://systemd.io/CREDENTIALS/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "CREDENTIALS_DIRECTORY"
SECRET_KEYS = (
    "http.token_file", "http.tls.cert", "http.tls.key", "sinks.*.tls.cert", "sinks.*.tls.key", "public_key",
    "updates.public_key",
)  # fmt: skip
"""Keys of a config that name a file with a secret, or one that belongs to it; `*` is the index of a list."""


def use_credentials(document: Any, environment: Mapping[str, str]) -> None:
    """Name, in a config, the files that systemd hands over in place of the written ones."""
    folder = environment.get(FOLDER_VARIABLE)
    if not folder:
        return
    for key in SECRET_KEYS:
        for place, holder, name in _find_places(document, key.split("."), ""):
            path = Path(folder) / place
            if path.is_file():
                holder[name] = str(path)


def _find_places(value: Any, names: Sequence[str], place: str) -> Iterator[tuple[str, Any, str]]:
    """The full key, the mapping and the last name of each value that is reached by these names."""
    name, *further = names
    if name == "*":
        for index, item in enumerate(value if isinstance(value, list) else []):
            yield from _find_places(item, further, f"{place}{index}.")
    elif isinstance(value, dict) and name in value:
        if further:
            yield from _find_places(value[name], further, f"{place}{name}.")
        else:
            yield f"{place}{name}", value, name
