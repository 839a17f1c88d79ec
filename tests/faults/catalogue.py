"""The fault table: one scenario for each row."""

from __future__ import annotations

from tests.faults import (
    arrivals,
    cameras,
    delivery,
    engines,
    events,
    http_fuzz,
    kills,
    network,
    orders,
    overload,
    reloads,
)
from tests.faults.scenario import Scenario

BESIDE = "the others lose < 1 % of their frames; the box serves within 10 s"

SCENARIOS = (
    Scenario(
        "drops", "a camera drops", "back within 2 s of its return; memory < 5 MB more, threads and descriptors flat",
        "drops", 100, 3, cameras.drops,
    ),
    Scenario("camera-hangs", "one of 16 cameras hangs", BESIDE, "seconds", 60, 5, cameras.hangs),
    Scenario("camera-silent", "one of 16 cameras is silent at start", BESIDE, "seconds", 60, 5, cameras.silent),
    Scenario("camera-garbage", "one of 16 cameras sends garbage", BESIDE, "seconds", 60, 5, cameras.garbage),
    Scenario(
        "overload", "4 times more work than the box can do",
        "queues bounded; late <= 1 % of what is published; lag does not grow; the ledger adds up",
        "seconds", 60, 6, overload.overload,
    ),
    Scenario(
        "damage", "damaged video (bits flipped, cut, resolution changed)",
        "no crash; goes on at the next good frame; counted", "faults of each kind of source", 100, 6,
        cameras.damage_video,
    ),
    Scenario(
        "sinks", "disk full, broker gone, webhook hanging 60 s, pipe without a reader",
        "inference goes on; counted; recovers by itself; SIGTERM within 5 s; final ledger written when the disk has "
        "room", "times", 5, 1, delivery.troubles,
    ),
    Scenario(
        "engine-raises", "an engine that raises on every frame", "that query pauses (breaker, back-off), others go on",
        "times", 10, 1, engines.raises,
    ),
    Scenario(
        "engine-hangs", "an engine that hangs", "a restart within 15 s with the ledger kept", "hangs", 5, 1,
        engines.hangs,
    ),
    Scenario(
        "kills", "kill -9 at random moments", "no torn file, no key twice; serving again within 10 s", "kills", 50, 3,
        kills.kills,
    ),
    Scenario(
        "reload-bad", "reload with each kind of bad bundle or config", "nothing applied, one line", "times each", 10, 1,
        reloads.refuse_wrong,
    ),
    Scenario(
        "reloads", "reloads between two bundles of different architectures",
        "memory drift < 10 MB; no frame unaccounted for; gap <= one frame for queries that did not change", "reloads",
        1000, 6, reloads.back_and_forth,
    ),
    Scenario(
        "http", "HTTP asked by its own OpenAPI schema (schemathesis)", "no 5xx, no hang over 1 s", "seconds", 300, 6,
        http_fuzz.fuzz,
    ),
    Scenario(
        "idle-clients", "clients that connect and send nothing, or a head that never ends",
        "health within 1 s; memory + 30 MiB at most", "connections", 5000, 300, network.idle_clients,
    ),
    Scenario(
        "webhook-401", "a webhook that refuses the box for a while", "nothing is lost", "times", 5, 1,
        network.sink_refuses,
    ),
    Scenario(
        "update-kills", "kill -9 at random moments of an update", "the old or the new bundle, whole", "kills", 200, 5,
        network.update_kills,
    ),
    Scenario(
        "rollback-kills", "kill -9 at random moments of a rollback by hand",
        "done at the next start, or not begun; the history is whole", "kills", 200, 5, network.rollback_kills,
    ),
    Scenario(
        "event-kills", "kill -9 at random moments while events go on", "no message twice, no end without its start",
        "kills", 20, 2, events.kills,
    ),
    Scenario(
        "event-rules", "reloads with wrong zones, hours, classes, events", "refused; events go on", "times each", 10, 1,
        events.wrong_rules,
    ),
    Scenario(
        "orders", "two clients that set one query twice a second, wrong orders, then kill -9",
        "wrong ones refused; the last one holds, over the kill too", "seconds", 60, 5, orders.contradict,
    ),
    Scenario(
        "push-overload", "frames by HTTP at four times what the box answers", "each is answered or gets 429; 0 lost",
        "seconds", 30, 3, events.push_overload,
    ),
    Scenario(
        "update-lies", "an update server that offers cut, damaged, unsigned and foreign bundles",
        "none is taken; a right one is", "times each", 5, 1, events.lying_updates,
    ),
    Scenario(
        "zmq", "clients of `zmq` that lie, send half a model, leave, never read",
        "refused in one line; each tensor of an honest client gets its answer", "seconds", 60, 5,
        arrivals.lying_detectors,
    ),
    Scenario(
        "clips-full", "the disk of clips is full, and has room again", "events go on; clips come back", "times", 5, 1,
        arrivals.clips_without_room,
    ),
)  # fmt: skip
"""In the order of the table."""
