"""The policies, one file each, chosen by name; the simulator and the daemon use the same."""

from __future__ import annotations

from gemel.edge_runtime.scheduler.types import Policy
from gemel.models.plugins import Registry

POLICIES: Registry[Policy] = Registry("gemel.policies", "policy", Policy, makes=True)
DEFAULT_POLICY = "adaptive"


def policy_named(text: str, where: str = "--policy", key: str = "") -> Policy:
    """The policy of this name, with options after a colon if it has some; InputError when there is none."""
    return POLICIES.find(text, where, key)
