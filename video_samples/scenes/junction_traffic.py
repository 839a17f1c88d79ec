"""The junction in motion: its paths, signal phases, arrivals and the ways people walk."""

from __future__ import annotations

import numpy as np

from video_samples.movers.crowd import Route
from video_samples.movers.traffic import Flow, arc, make_path
from video_samples.scenes.junction_plan import HALT_X, LANES, STOP_B, STOP_E, STOP_W, ZEBRA_EAST, ZEBRA_SIDE, ZEBRA_WEST
from video_samples.scenes.scene import Phase, Signals, World


def start_world(seed: int, night: bool) -> World:
    """Traffic of one clip; where in the signal cycle it begins follows from the seed."""
    rng = np.random.default_rng([seed, 77])
    phases = [Phase("main", 18.0 if night else 9.0), Phase("side", 4.5), Phase("walk", 3.0, clear_s=7.0)]
    signals = Signals(phases, float(rng.uniform(0, 38)))
    straight = {
        name: make_path(
            name,
            (name, name),
            "main",
            [(-75, y), (45, y)] if name[0] == "E" else [(45, y), (-75, y)],
            (STOP_E if name[0] == "E" else STOP_W, y),
            (45, y) if name[0] == "E" else (-75, y),
        )
        for name, y in LANES.items()
    }
    bus = make_path(
        "W1-bus",
        ("W1", "W1"),
        "main",
        [
            (45, 12.25),
            (-8, 12.25),
            (-11.5, 12.6),
            (-15.5, 15.2),
            (-17, 15.75),
            (-25, 15.75),
            (-27.5, 15.2),
            (-32, 12.6),
            (-35, 12.25),
            (-75, 12.25),
        ],
        (STOP_W, 12.25),
        (-10, 12.25),
        (HALT_X, 15.75),
    )
    right = make_path(
        "B-right",
        ("B", "E1"),
        "side",
        [(1.75, -40), (1.75, -3.2), *arc((6.7, -3.2), 4.95, 180, 90)[1:], (45, 1.75)],
        (1.75, STOP_B),
        (1.75, -3),
    )
    left = make_path(
        "B-left",
        ("B", "W2"),
        "side",
        [(1.75, -40), (1.75, 2.2), *arc((-4.8, 2.2), 6.55, 0, 90)[1:], (-75, 8.75)],
        (1.75, STOP_B),
        (1.75, 2),
    )
    into = make_path(
        "E1-right",
        ("E1", "B-out"),
        "main",
        [(-75, 1.75), (-6.2, 1.75), *arc((-6.2, -2.7), 4.45, 90, 0)[1:], (-1.75, -40)],
        (STOP_E, 1.75),
        (-6.5, 1.75),
    )
    cycle = make_path("cycle", ("cycle", "cycle"), "main", [(-75, -1.0), (45, -1.0)], (STOP_E, -1.0), (45, -1.0))
    mixed = {"car": 0.74, "truck": 0.26}
    calm = 3.0 if night else 1.0
    flows = [
        Flow(straight["E1"], {"car": 0.8, "truck": 0.12, "bus": 0.08}, 9.0 * calm),
        Flow(straight["E2"], mixed, 8.5),
        Flow(straight["W1"], mixed, 13.0),
        Flow(straight["W2"], mixed, 8.5),
        Flow(bus, {"bus": 1.0}, 27.0),
        Flow(right, {"car": 1.0}, 17.0),
        Flow(left, {"car": 0.8, "truck": 0.2}, 17.0),
        Flow(into, {"car": 1.0}, 17.0 * calm),
        Flow(cycle, {"bicycle": 1.0}, 11.0 if not night else 24.0),
    ]
    thin = 1.0 if not night else 2.4
    zw, ze, zs = (sum(z) / 2 for z in (ZEBRA_WEST, ZEBRA_EAST, ZEBRA_SIDE))
    routes = [
        Route(((-60, 19.6), (40, 19.6)), 13 * thin, spread=0.9),
        Route(((-60, -4.2), (-8, -4.2), (-8.6, -15)), 16 * thin),
        Route(((40, -4.2), (8, -4.4), (8.0, -15)), 16 * thin),
        Route(((-1.5, 76), (-0.5, 22), (-20, 19.8), (-60, 19.8)), 13 * thin),
        Route(((2, 80), (1.0, 22), (18, 19.4), (40, 19.4)), 13 * thin),
        Route(((-30, -4), (zw, -2.9), (zw, 14.9), (zw, 19), (-60, 19.6)), 13 * thin, wait_at=(1,)),
        Route(((30, 19.4), (ze, 15.0), (ze, -3.0), (9, -6), (9, -16)), 13 * thin, wait_at=(1,)),
        Route(((0, 60), (-2, 20), (zw, 14.9), (zw, -2.9), (-30, -4.2)), 13 * thin, wait_at=(2,)),
        Route(((-16, -5), (-4.6, zs), (4.6, zs), (20, -5)), 12 * thin, wait_at=(1,)),
        Route(((-45, 19.8), (-21, 18.1), (-45, 19.6)), 16 * thin, linger={1: (8, 20)}, spread=1.6),
    ]
    return World(seed, flows, routes, signals, dwell_s=(6.0, 9.0), warm_up_s=26.0 + float(rng.uniform(0, 12)))
