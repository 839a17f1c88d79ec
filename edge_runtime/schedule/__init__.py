"""The schedule: which query runs next, on how many frames, what is loaded for it, what makes room.

Pure: no clock, no threads, no device. What all policies (`edge_runtime.policies`) have in common is here.
"""

from __future__ import annotations

from edge_runtime.schedule.values import CLOCK_SLACK_S, Decision, Demand, Plan, Policy, Situation

__all__ = ["CLOCK_SLACK_S", "Decision", "Demand", "Plan", "Policy", "Situation"]
