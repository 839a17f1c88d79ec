"""`gemel simulate`, `gemel plan`, `gemel profile` and `gemel place`: boxes on paper, and what one costs here."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from gemel.commands import grammar
from gemel.commands.outcome import DONE, FELL_SHORT, Outcome
from gemel.conditions import DEFAULT_PLACEMENT, EVERY_DEVICE, MEASURED, Conditions, Objective, PlacementOptions, Shared
from models.errors import InputError

MAX_SECONDS = 7 * 24 * 3600.0


def register(commands: Any) -> None:
    """Their grammar."""
    made = grammar.command(commands, "simulate", "the box's own schedule on a virtual clock", simulate)
    made.add_argument("bundle", metavar="BUNDLE|WORKLOAD", nargs="?")
    _conditions(made)
    seconds = "simulated seconds (default 60)"
    made.add_argument(
        "--duration", type=grammar.real(0, MAX_SECONDS, open_below=True), default=60.0, metavar="S", help=seconds
    )
    made.add_argument("--replay", metavar="TRACE", help="replay what a box recorded (`trace:` in its config) instead")

    summary = "what fits, what swaps and what rate each query will have, before anything is shipped"
    made = grammar.command(commands, "plan", summary, plan)
    made.add_argument("bundle", metavar="BUNDLE|WORKLOAD")
    _conditions(made, f"; {EVERY_DEVICE}: every one, to compare")

    summary = "measure what a bundle's queries cost on this machine; writes BUNDLE.profile.json"
    made = grammar.command(commands, "profile", summary, profile)
    made.add_argument("bundle", metavar="BUNDLE")
    made.add_argument("--device", choices=("cpu", "cuda"), help="where to measure (default: cuda where there is one)")
    made.add_argument("--engine", default="auto", metavar="NAME", help="an engine of docs/engines.md (default: auto)")
    made.add_argument("--workload", metavar="FILE", help="its val footage says what answers are worth as they age")
    grammar.factories(made)

    made = grammar.command(commands, "place", "which queries of a fleet go on which box", place)
    made.add_argument("fleet", metavar="FLEET")
    made.add_argument("-o", "--out", required=True, metavar="DIR", help="gets placement.json and a workload per box")
    objective = (
        "boxes: the cheapest boxes that hold all (default); frames: most frames in time on all boxes; fair: the query "
        "that fares worst as well as can be"
    )
    made.add_argument("--objective", choices=get_args(Objective), default="boxes", help=objective)
    shared = (
        "what models on one box share: predicted (default: what merges have kept), ceiling (all that they could), none"
    )
    made.add_argument("--shared", choices=get_args(Shared), default="predicted", help=shared)
    part = "every box has time for this part of the frames that are asked of it (default 0: memory alone decides)"
    made.add_argument("--min-frames", type=grammar.real(0, 1), default=0.0, metavar="PART", help=part)
    made.add_argument("--from", dest="before", metavar="DIR", help="where all is placed now: little is to move")
    made.add_argument(
        "--max-seconds", type=grammar.real(0, 86_400, open_below=True), default=DEFAULT_PLACEMENT.seconds, metavar="N",
        help="look for a better placement, or for a proof that there is none, for so long (default 60)",
    )  # fmt: skip
    grammar.seed(made)


def _conditions(made: argparse.ArgumentParser, or_all: str = "") -> None:
    grammar.device(made, more=f", or {MEASURED} where BUNDLE.profile.json lies beside the bundle{or_all}")
    memory = "min, 50%%, 75%%, all (of what the originals need), or a size such as 512MiB (default min)"
    made.add_argument("--memory", default="min", metavar="M", help=memory)
    policies = "schedule: adaptive, gemel or time-sharing (default adaptive)"
    made.add_argument("--policy", default="adaptive", metavar="P", help=policies)
    made.add_argument("--shared", action="store_true", help="a workload's models share all that they could")
    overflow = "a query too large for the memory runs all the same: what does not fit is copied in every run"
    made.add_argument("--overflow", action="store_true", help=overflow)
    grammar.factories(made)
    grammar.seed(made)


def _asked(args: argparse.Namespace) -> Conditions:
    return Conditions(args.memory, args.device, args.policy, args.shared, args.overflow, tuple(args.factory), args.seed)


def simulate(args: argparse.Namespace) -> Outcome:
    """The schedule on a virtual clock, or what a box recorded."""
    from gemel.planner import format_replay, replay_run, simulate_box

    if args.replay is not None:
        replayed = replay_run(args.replay)
        return Outcome(replayed.to_json(), format_replay(replayed))
    if args.bundle is None:
        raise InputError("gemel simulate", "nothing to simulate", "give a bundle, a workload or --replay TRACE")
    found = simulate_box(args.bundle, _asked(args), args.duration)
    return Outcome(found.to_json(), found.to_text())


def plan(args: argparse.Namespace) -> Outcome:
    """What fits and what swaps, on one device or on all there are profiles of."""
    from gemel.planner import plan_box, plan_every_device

    planned = plan_every_device if args.device == EVERY_DEVICE else plan_box
    found = planned(args.bundle, _asked(args))
    return Outcome(found.to_json(), found.to_text())


def profile(args: argparse.Namespace) -> Outcome:
    """Measures this machine with one bundle."""
    from gemel.profiler import profile_bundle
    from gemel.progress import show_progress

    with show_progress() as progress:
        found = profile_bundle(
            args.bundle, args.device, args.factory, progress=progress, engine=args.engine, workload=args.workload
        )
    return Outcome(found.to_json(), found.to_text())


def place(args: argparse.Namespace) -> Outcome:
    """Places a fleet's queries; falls short where some have no place."""
    from gemel.fleet import load_fleet
    from gemel.placing.placement import before_of, earlier
    from gemel.placing.placing import place_fleet
    from gemel.progress import show_progress

    fleet = load_fleet(args.fleet)
    earlier(args.out, fleet)
    before = before_of(args.before)
    asked = PlacementOptions(args.objective, args.shared, args.min_frames, args.seed, args.max_seconds)
    with show_progress() as progress:
        found = place_fleet(fleet, asked, before, progress)
    found.write(args.out)
    return Outcome(found.to_json(), found.to_text(), FELL_SHORT if found.unplaced else DONE)
