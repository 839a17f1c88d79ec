"""How a bundle is to be judged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gemel.planning.conditions import DEFAULT_DEVICE

LEAST = "min"


@dataclass(frozen=True)
class Asked:
    """What an evaluation is asked for.

    `device` names a profile of the virtual clock, or is `measured`: the costs in BUNDLE.profile.json. `memory`, a
    setting or a size, is what the box is to have: what the report says first holds for it. With `wall_s` the merged
    queries run on this machine, too, for so many seconds. `fiftyone` is a folder to be filled with the test frames and
    both models' answers, for other tools.
    """

    device: str = DEFAULT_DEVICE
    seeds: int = 3
    memory: str = LEAST
    wall_s: float = 0.0
    fiftyone: Path | None = None

    def words(self) -> list[str]:
        """The options of `gemel eval` that say the same."""
        said = ["--device", self.device, "--memory", self.memory, "--seeds", str(self.seeds)]
        said += ["--wall", f"{self.wall_s:g}"] if self.wall_s else []
        return said + (["--fiftyone", str(self.fiftyone)] if self.fiftyone is not None else [])
