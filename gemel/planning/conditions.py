"""The conditions under which a box is tried on paper; nothing heavy is imported for them."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_DEVICE = "orin-nano-8gb"
"""The profile that every command takes unless it is told another."""
DEMO_DEVICE = "jetson-nano"
"""The demo's instead: its few small models press nothing larger."""
MEASURED = "measured"
"""Names the costs in BUNDLE.profile.json instead of a profile."""
EVERY_DEVICE = "all"


@dataclass(frozen=True)
class Conditions:
    """What a box is given: memory, a device, a policy.

    `memory` is a size such as 512MiB, or `min`, `50%`, `75%`, `all` of what the originals need. `device` names a
    profile, or is `measured`: the costs in BUNDLE.profile.json; None is measured where that file lies beside the
    bundle, else DEFAULT_DEVICE. A workload's models share nothing, or with `shared` all that they could. With
    `overflow`, queries too large for the memory overflow. `factories` are the `package.module:factory` models of a
    bundle that may be imported, from the current folder or Python's path; a workload's own always may.
    """

    memory: str = "min"
    device: str | None = None
    policy: str = "ours"
    shared: bool = False
    overflow: bool = False
    factories: tuple[str, ...] = ()
    seed: int = 0


STANDARD = Conditions()
