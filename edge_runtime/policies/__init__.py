"""The policies, one file each, chosen by name; the simulator and the daemon use the same."""

from __future__ import annotations

from edge_runtime.policies.gemel import GemelPolicy
from edge_runtime.policies.selection import SELECTING
from edge_runtime.policies.time_sharing import TimeSharingPolicy
from edge_runtime.scheduler.types import Policy
from models.errors import InputError

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
