"""The scheduler: which query runs next, on how many frames, what is loaded for it and what is evicted.

Pure: no clock, no threads, no device. What all policies (`edge_runtime.policies`) share is here.
"""

from __future__ import annotations

from gemel.edge_runtime.scheduler.types import CLOCK_SLACK_S, Decision, Plan, Policy, QuerySpec, SchedulerState

__all__ = ["CLOCK_SLACK_S", "Decision", "Plan", "Policy", "QuerySpec", "SchedulerState"]
