"""The tables that `make real` ends with, from the JSON that the steps of `make real` left."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

MIB = 2**20
SHIPPED = "top-down"
"""The method whose bundle the box runs and the report judges."""


def tables(name: str, steps: Path) -> str:
    """Markdown: originals, methods, each query under the shipped bundle, streaming, and the box's ledger."""
    paths = sorted(steps.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)  # in the order of the run
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    parts = [
        f"## {name}",
        _originals(found),
        _methods(found),
        _queries(found),
        *(_streaming(step) for name, step in found.items() if name.startswith("eval-")),
        _box(found),
        _commands(found),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """One Markdown table under its title; nothing without rows."""
    lines = ["| " + " | ".join(cell_text(value) for value in row) + " |" for row in rows]
    if not lines:
        return ""
    return "\n".join([f"### {title}", "", f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}", *lines])


def cell_text(value: Any) -> str:
    """A value as it stands in a table."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) >= 1000 else f"{value:.3f}"
    return str(value)


def _originals(found: dict[str, Any]) -> str:
    trained = [q for name, step in found.items() if name.startswith("train-") for q in step["result"]["queries"]]
    rows = [(q["id"], q["metric"], q["val"], q["test"], round(q["seconds"])) for q in trained]
    return table("Originals", ("query", "metric", "val", "test", "seconds"), rows)


def _methods(found: dict[str, Any]) -> str:
    rows = []
    for name, step in found.items():
        if not name.startswith("merge-"):
            continue
        r = step["result"]
        ratios = [q["ratio"] for q in r["queries"] if q["ratio"] is not None]
        ceiling = r["ceiling_fraction"]
        rows.append(
            (
                r["method"],
                r["bytes_before"] / MIB,
                r["bytes_after"] / MIB,
                r["saved_fraction"],
                r["saved_fraction"] / ceiling if ceiling else None,
                f"{sum(q['met'] and q.get('worth', True) for q in r['queries'])} of {len(r['queries'])}",
                min(ratios, default=None),
                float(r["flops"]),
                round(r["seconds"]),
            )
        )
    heads = ("method", "MiB before", "MiB after", "saved", "of the ceiling", "met", "worst ratio", "work", "seconds")
    return table("Methods", heads, rows)


def _queries(found: dict[str, Any]) -> str:
    step = found.get(f"merge-{SHIPPED}")
    keys = ("id", "metric", "original", "merged", "ratio", "chance_corrected", "met", "state", "worth")
    heads = ("query", *keys[1:5], "chance-corrected", "met", "proof", "original is evidence")
    rows = [[q.get(key) for key in keys] for q in step["result"]["queries"]] if step else []
    return table(f"Queries under `{SHIPPED}`, on test", heads, rows)


def _streaming(step: dict[str, Any]) -> str:
    arms: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in step["result"]["streaming"]:
        arms.setdefault((row["arm"], row["memory"]), []).append(row)
    accuracies = {key: [m["accuracy"] or 0.0 for m in members] for key, members in arms.items()}
    rows = [
        (
            arm,
            memory,
            members[0]["memory_bytes"] / MIB,
            mean(accuracies[arm, memory]),
            min(accuracies[arm, memory]),
            max((m["age_p95_ms"] for m in members if m["age_p95_ms"] is not None), default=None),
        )
        for (arm, memory), members in arms.items()
    ]
    heads = ("arm", "memory", "MiB", "mean accuracy", "worst query", "worst age p95 (ms)")
    device = step["result"].get("device", {}).get("title", "a device profile")
    return table(f"Streaming accuracy, virtual clock: {device}", heads, rows)


def _box(found: dict[str, Any]) -> str:
    step = found.get("run")
    ledger = step["result"].get("ledger", []) if step else []
    keys = ("received", "processed", "late", "failed", "pending")
    rows = [(row["query"], *(row[key] for key in keys), sum(row["dropped"].values())) for row in ledger]
    return table("The box over the clips, this machine", ("query", *keys, "dropped"), rows)


def _commands(found: dict[str, Any]) -> str:
    rows = [(f"`{step['command']}`", step["exit_code"], round(step["seconds"])) for step in found.values()]
    return table("Commands", ("command", "exit code", "seconds"), rows)


def print_simulation(
    usage: str,
    count: str,
    default: int,
    title: str,
    heads: Sequence[str],
    rows: Callable[[int], list[tuple[str, ...]]],
    arguments: Sequence[str] | None,
) -> int:
    """The command of a simulation with one option, how many (`count`) are drawn: its table."""
    parser = argparse.ArgumentParser(description=usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(f"--{count}", type=int, default=default)
    number = getattr(parser.parse_args(arguments), count)
    print(table(f"{number} {count} each{title}", heads, rows(number)))
    return 0
