"""Delivery: results on their way to sinks, each with a thread and a bounded outbox of its own.

What is queued, dropped and tried again is decided by `outbox`, which knows no thread and no clock; a `courier` carries
that out for one sink. A kind of sink is one file, chosen by name in a box config (`registry`).
"""
