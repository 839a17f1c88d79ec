"""Ways to damage a valid file: one to three random steps on its values or on its bytes.

All that is random comes from a `random.Random`. A tree is what JSON and YAML hold; a
kind of file may add values of its own (tensors).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from random import Random
from typing import Any

MAX_STEPS = 3
MANY = 3000
MAX_PLACES = 4 * MANY

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 10**6, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**30,
    0.0, -0.0, 0.5, -0.5, 1.0, 1e-300, 1e300, math.inf, -math.inf, math.nan,
    "", " ", "a", "x" * 5000, "a\0b", "\ud800", "\u202egnp", "x\n/path: sound", "\x1b[2J", "\u00b2", "1e9", "true",
    "nan", ".", "..", "/", "~", "/dev/zero", "/dev/null", "/proc/self/mem", "/nowhere/at/all", "workload.yaml",
    "b.safetensors", "data", "http://127.0.0.1:9/x", "rtsp://127.0.0.1:9/x", "torchvision:resnet18", "os:getcwd",
    "no.module:name", "min", "1TiB", "-1", "cuda", "0" * 64,
    [], {}, [[]], [None], {"": None}, [0] * MANY, ["a", "a"], {"a": {"a": {"a": 1}}},
)  # fmt: skip
"""Values that replace any other."""
KEYS = ("", "a", "id", "__metadata__", "__class__", "constructor", "x" * 2000, "a\nb", "a.b", "\ud800", "0", "-1")
DEPTHS = (1, 2, 60)
PIECES = (
    b"\0", b"\xff", b"\xff\xfe", b"\r", b"\n", b"\n\n", b"\t", b"{", b"]", b'"', b"[" * 100_000, b'{"a":' * 20_000,
    b"- " * 5000, b"&a [*a]", b"*a", b"!!int x", b"? ", b"---\n", b"1" * 6000, b"-", b"NaN", b"1e999", b"null",
    b"\xed\xa0\x80", b"\x00" * 4096,
)  # fmt: skip
"""Bytes that are inserted."""
STEPS = ("replace", "replace", "replace", "drop", "double", "rename", "wrap", "swap", "shift", "shift")


def damage_tree(tree: Any, random: Random, values: Sequence[Any] = VALUES) -> Any:
    """A copy with one to three of its values replaced, dropped, doubled, renamed, wrapped, swapped or shifted."""
    holder = [copy.deepcopy(tree)]
    for _ in range(random.randint(1, MAX_STEPS)):
        places = [place for place in _places(holder) if place[0] is not holder] or _places(holder)
        if not places:  # the whole tree was dropped
            return None
        step, (node, key) = random.choice(STEPS), random.choice(places)
        if step == "replace":
            node[key] = copy.deepcopy(random.choice(values))
        elif step == "drop":
            del node[key]
        elif step == "double":
            times = random.choice((1, 2, MANY))
            if isinstance(node, list):
                node[key:key] = [node[key]] * times
            else:
                node.update({f"{key}{index}": node[key] for index in range(times)})
        elif step == "rename" and isinstance(node, dict):
            node[random.choice([*KEYS, *node])] = node.pop(key)
        elif step == "wrap":
            for _ in range(random.choice(DEPTHS)):
                node[key] = [node[key]] if random.random() < 0.5 else {"a": node[key]}
        elif step == "swap":
            other, name = random.choice(places)
            node[key], other[name] = copy.deepcopy(other[name]), copy.deepcopy(node[key])
        elif step == "shift":
            node[key] = _shift(node[key], random, values)
    return holder[0] if holder else None


def _places(node: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) below a node."""
    found: list[tuple[Any, Any]] = []
    waiting = [node]
    while waiting and len(found) < MAX_PLACES:
        node = waiting.pop()
        if isinstance(node, dict):
            found += [(node, key) for key in node]
            waiting += node.values()
        elif isinstance(node, list):
            found += [(node, index) for index in range(len(node))]
            waiting += node
    return found


def _shift(value: Any, random: Random, values: Sequence[Any]) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return random.choice((-value, value + 1, value - 1, value + 0.5, value * 1e6, str(value), [value], bool(value)))
    if isinstance(value, str):
        hexed = value.encode("utf-8", "replace")[:3].hex()
        return random.choice((value.upper(), value + "x", value[:-1], value * 2, [value], hexed))
    return copy.deepcopy(random.choice(values))


def damage_bytes(data: bytes, random: Random) -> bytes:
    """The bytes with one to three of them flipped, or pieces cut, inserted, repeated, overwritten or zeroed."""
    content = bytearray(data)
    for _ in range(random.randint(1, MAX_STEPS)):
        start = random.randint(0, len(content))
        end = min(len(content), start + random.choice((1, 4, 100, 10_000)))
        step = random.randrange(8)
        if step == 0 and start < len(content):
            content[start] ^= 1 << random.randrange(8)
        elif step == 1:
            del content[start:]
        elif step == 2:
            del content[start:end]
        elif step == 3:
            content[start:start] = random.choice(PIECES)
        elif step == 4:
            content[start:start] = bytes(content[start:end]) * random.choice((1, 20))
        elif step == 5:
            content[start:end] = bytes(end - start)
        elif step == 6:
            content[start:end] = bytes(random.randrange(256) for _ in range(min(16, end - start)))
        elif step == 7 and random.random() < 0.2:
            content = bytearray(random.choice(PIECES))
    return bytes(content)
