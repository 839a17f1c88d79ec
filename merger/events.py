"""Events of merges and trainings, log rows and their words: one enum each for events, steps and outcomes."""

from __future__ import annotations

from enum import Enum


class Event(str, Enum):
    """Events of a merge and a training, with their fields; events of a merge that name `flops` are log rows too."""

    QUERY = "query"
    """query, index, count: training of an original begins"""
    CYCLE = "cycle"
    """query, cycle, cycles, val"""
    ORIGINAL = "original"
    """query, metric, val, test, seconds"""
    EPOCH = "epoch"
    """queries, epoch, epochs, loss, ratios {query: ratio}"""
    REFERENCE = "reference"
    """query, metric, val, needed: an original's result"""
    RECIPE = "recipe"
    """rate, epochs, features, private"""
    IDENTICAL = "identical"
    """queries (settled by it alone), sets, saved_bytes"""
    LEFT_OUT = "left-out"
    """step (a Change), possible_bytes (what it could save beyond what holds), price_bytes (what it must)"""
    STEP = "step"
    """step (a Change), query, saved_bytes (what the query saves), ratio, required, taken, kept_bytes, flops_per_s,
    agreement; of steps of bits also in_integers, bits"""
    ACCEPTED = "accepted"
    """lower_ends {query: what is shown of its ratio}, accepted, unproven and refused [queries]"""
    ATTEMPT = "attempt"
    """`gemel`: round, group, members, kept, ratios, epochs, diverged; `mainstream`: query, prefix, ratio, held"""
    SEARCH_ROUND = "round"
    """round, rounds, signature, members, saved_bytes, ceiling_bytes, ratios, seconds"""
    CAMERA_PREFIX = "camera-prefix"
    """query, donor, common (layers), of, ratio, required, tried [[length, ratio]], saved_flops_per_s"""
    FORECAST = "forecast"
    """text, seconds and money (of the whole merge on this machine), first (nothing is trained yet)"""
    PROCESSES = "processes"
    """queries of each process"""
    TEST = "test"
    """query, metric, original, merged, ratio, met, worth, reason (why there is no evidence), state"""


class Change(str, Enum):
    """What the steps of the ladder change, from least to most."""

    IDENTICAL = "identical tensors"
    NETWORK = "another network, unchanged"
    MEAN = "means of kin, untrained"
    NETWORK_TRAINED = "another network, norms and head trained"
    PRIVATE = "layers of another, norms and head trained"
    TRUNK = "one network for all, trained"
    LAYERS = "shared layers, trained"
    HALF = "the heavier half of the layers, trained"
    FP16 = "weights in fp16"
    INT8 = "weights in int8"
    INT4 = "weights in int4"


class StepStart(str, Enum):
    """Whether a step of the ladder begins; left out is one that could save less than its price."""

    BEGINS = "begins"
    LEFT_OUT = "left out"
    OUT_OF_TIME = "out of time"
