"""What a box may be asked for: bounds of the numbers in workloads and box configs, far beyond any that is in earnest.

docs/guide.md tells them.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

from pydantic import AfterValidator, Field

MAX_CAMERAS, MAX_QUERIES, MAX_CLASSES = 1000, 1000, 10_000


def _at_least(value: float, least: float) -> float:
    if value < least:
        raise ValueError(f"less than {least:g}, the least there can be")
    return value


Fps = Annotated[float, Field(gt=0, le=1000), AfterValidator(partial(_at_least, least=0.0001))]
"""Frames a second, from one in about three hours."""
SlaMs = Annotated[float, Field(gt=0, le=86_400_000), AfterValidator(partial(_at_least, least=1.0))]
"""Milliseconds, up to a day."""
Priority = Annotated[int, Field(ge=1, le=1000)]
Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""What queries, cameras and boxes are called: also a file's name, and a word in addresses."""
ClassName = Annotated[str, Field(min_length=1, max_length=200)]
PathText = Annotated[str, Field(min_length=1, max_length=4096)]
"""A path or an address, as long as the system takes one."""
