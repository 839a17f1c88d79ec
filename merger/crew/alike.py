"""What the processes of a merge must have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from merger.crew.crew import Crew
from models.errors import InputError


def check_alike(crew: Crew, identity: Mapping[str, Any]) -> None:
    """Raise InputError where another process has other files, options or another version of torch."""
    own = {**identity, "torch": torch.__version__}
    everyones = crew.each(lambda: own)
    crew.once(partial(_compare, everyones))


def _compare(everyones: Sequence[Mapping[str, Any]]) -> None:
    for rank, other in enumerate(everyones):
        differs = [key for key, value in other.items() if value != everyones[0][key]]
        if differs:
            fault = f"process {rank} has another {' and '.join(differs)} than the first"
            raise InputError("torchrun", fault, "start all with the same command, files and version of torch")
