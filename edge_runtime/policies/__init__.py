"""The policies, one file each, chosen by name; the simulator and the daemon use the same."""

from __future__ import annotations

from gemel.edge_runtime.policies.gemel import GemelPolicy
from gemel.edge_runtime.policies.selection import SELECTING
from gemel.edge_runtime.policies.time_sharing import TimeSharingPolicy
from gemel.edge_runtime.scheduler.types import Policy
from gemel.models.errors import InputError

POLICIES: dict[str, Policy] = {}
DEFAULT_POLICY = "adaptive"


def register(policy: Policy) -> Policy:
    """Enter a policy under its name."""
    POLICIES[policy.name] = policy
    return policy


register(SELECTING)
register(GemelPolicy())
register(TimeSharingPolicy())


def policy_named(name: str, where: str = "--policy", key: str = "") -> Policy:
    """The policy of this name; InputError when there is none."""
    if name not in POLICIES:
        raise InputError(where, f"there is no policy '{name}'", f"choose one of: {', '.join(POLICIES)}", key)
    return POLICIES[name]
