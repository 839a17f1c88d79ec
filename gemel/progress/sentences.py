"""Each event of long work as a sentence in plain words; one that is not known here still reads.

Events of training and merging are described in `merger.events`, of how a merge goes in docs/merging.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gemel.progress.words import about, listed, metric, told, worst
from gemel.text import duration, number, percent, size
from models.errors import one_line

Fields = Mapping[str, Any]


def sentence(event: str, fields: Fields) -> str:
    """What is told of an event, in one line, without a full stop."""
    return one_line(_sentence(event, fields))


def _sentence(event: str, fields: Fields) -> str:
    known = SENTENCES.get(event)
    if known is not None:
        try:
            return known(fields)
        except (KeyError, TypeError, ValueError, AttributeError):
            pass  # fields that a newer worker names otherwise
    words = ", ".join(told(name, value) for name, value in fields.items() if value is not None)
    return event.replace("_", " ") + (f" ({words})" if words else "")


def _warning(f: Fields) -> str:
    return f"take note: {f['text']}"


def _query(f: Fields) -> str:
    return f"training the original of {f['query']}, {f['index']} of {f['count']}"


def _cycle(f: Fields) -> str:
    return f"{f['query']}: training cycle {f['cycle']} of at most {f['cycles']} ends at {number(f['val'])} on val"


def _original(f: Fields) -> str:
    took = f", after {duration(f['seconds'])}" if "seconds" in f else ""
    test = f", {number(f['test'])} on test" if "test" in f else ""
    return f"the original of {f['query']} is trained: {metric(f['metric'])} {number(f['val'])} on val{test}{took}"


def _epoch(f: Fields) -> str:
    queries = f["queries"]
    who = "all together" if len(queries) > 1 else f"{queries[0]}"
    text = f"training {who}, epoch {f['epoch']} of {f['epochs']}"
    ratios = f.get("ratios")
    if not ratios:
        return f"{text}: loss {f['loss']:.3g}" if "loss" in f else text
    if len(ratios) == 1:
        return f"{text}: it keeps {number(next(iter(ratios.values())), 2)} of its original"
    query, ratio = worst(ratios)
    return f"{text}: worst query keeps {number(ratio, 2)} of its original ({query})"


def _reference(f: Fields) -> str:
    return (
        f"the original of {f['query']} reaches {metric(f['metric'])} {number(f['val'])} on val; "
        f"merged it must keep at least {number(f['needed'])}"
    )


def _precision(f: Fields) -> str:
    times = [
        f"{name} {1000 * f[name]:.0f} ms" for name in ("fp32", "tf32", "bf16") if isinstance(f.get(name), (int, float))
    ]
    return f"{f['model']} trains in {f['chosen']}" + (f" (a step takes {', '.join(times)})" if times else "")


def _layout(f: Fields) -> str:
    kinds = {
        kind: [query for query, own in f["precisions"].items() if own == kind] for kind in f["precisions"].values()
    }
    computed = "; ".join(f"{kind} for {listed(queries)}" for kind, queries in kinds.items())
    why = f", since memory was not enough for {' or for '.join(f['full'])}" if f["full"] else ", all of which fits"
    return f"a step has {f['chosen']}{why}" + (f"; precision: {computed}" if computed else "")


def _workers(f: Fields) -> str:
    where = f" in the Ray cluster {f['on']}" if f.get("on") else " at once"
    threads = f", {f['threads']} threads each" if isinstance(f.get("threads"), int) else ""
    return f"{about(f['workers'], 'worker')}{where}{threads}"


def _crew(f: Fields) -> str:
    parts = "; ".join(f"{', '.join(own) or 'none'} ({percent(load)})" for own, load in zip(f["queries"], f["loads"]))
    return (
        f"{len(f['queries'])} processes, queries by FLOPs and by what they share: {parts}; "
        f"gradients of up to {size(f['crossing_bytes'])} cross a step"
    )


def _sums(f: Fields) -> str:
    given = ", ".join(size(nbytes / max(1, f["steps"])) for nbytes in f["given_bytes"])
    return f"in {f['steps']} steps the processes handed over {given} of gradients a step to be summed"


def _ancestry(f: Fields) -> str:
    kinship = min(f["kinship"].values(), default=0.0)
    if f["common"]:
        return f"the originals are related: their weights are close (kinship {number(kinship, 2)} of 1)"
    return (
        f"the originals are not related: each learned by itself (kinship {number(kinship, 2)} of 1), so the same "
        "feature may sit in other channels"
    )


def _equal(f: Fields) -> str:
    as_is = f"; {listed(f['settled'])} share nothing else and stay as they are" if f["settled"] else ""
    sets = about(f["sets"], "set of layers is", "sets of layers are")
    return f"{sets} equal already: {size(f['saved_bytes'])} less without any training{as_is}"


def _aligned(f: Fields) -> str:
    return (
        f"{f['query']}: {f['moved']} of {f['channels']} channels change places, so that they match those of the others"
    )


def _start(f: Fields) -> str:
    name, _, solved = f["start"].partition(", ")
    what = {
        "mean": "the mean of all weights",
        "aligned mean": "the mean of all weights, channels matched first",
    }.get(name, f"the weights of {name}")
    again = ", then solved for layer by layer" if solved else ""
    return f"starting from {what}{again}: {percent(f['error'], 0)} of what the models knew is lost before training"


def _rate(f: Fields) -> str:
    tried = f"tried the learning rate {f['rate']:g} for {f['epochs']:g} epochs"
    if "features" in f:
        tried += f" ({_way(f)})"
    if "regained" in f:
        return f"{tried}: {percent(max(0.0, f['regained']), 0)} of what was lost is back"
    if f["ratio"] is None:
        return f"{tried}: the training diverged"
    return f"{tried}: the worst query keeps {number(f['ratio'], 2)} of its original"


def _recipe(f: Fields) -> str:
    return f"training at the learning rate {f['rate']:g}, {f['epochs']} epochs at a time, {_way(f)}"


def _way(f: Fields) -> str:
    return f"features weigh {f['features']:g}, private weights move at {f['private']:g} of the rate"


def _waits(f: Fields) -> str:
    why = f"it loses {percent(f['lost'], 0)} at the start" if "lost" in f else f"it keeps only {number(f['ratio'], 2)}"
    return f"{f['waits']} waits until the others are merged: {why} ({number(f['required'], 2)} is required)"


def _accepted(f: Fields) -> str:
    return f"the others are merged: {size(f['saved_bytes'])} saved; now those that waited join"


def _adopting(f: Fields) -> str:
    return "with all layers shared every query is lost: on with models that become parts of others"


def _takes(f: Fields) -> str:
    layers = f"{f['takes']} takes over {about(f['layers'], 'layer', 'layers')} of {f['from']}"
    kept = "kept" if f["accepted"] else f"{number(f['required'])} is required"
    return f"{layers}: {number(f['ratio'])} of its original ({kept}); {size(f['accepted_bytes'])} saved this way"


def _alone(f: Fields) -> str:
    reached = "enough" if f["ratio"] >= f["required"] else f"{number(f['required'])} is required"
    return f"{f['query']}, its private parts trained by themselves: {number(f['ratio'])} of its original ({reached})"


def _repair(f: Fields) -> str:
    if f["repair"] == "leaves":
        return f"{f['query']} does not reach what is required and keeps its original, unshared"
    return (
        f"{f['query']} gets help ({f['repair']}): it keeps {number(f['ratio'])} of its original "
        f"({number(f['required'])} is required)"
    )


def _widths(f: Fields) -> str:
    held = f"; not yet enough for {listed(f['in_the_way'])}" if f["in_the_way"] else ""
    query, ratio = worst(f["ratios"])
    stored = ", ".join(f"{size(nbytes)} {name}" for name, nbytes in f["stored_bytes"].items() if nbytes)
    return f"stored in fewer bits ({stored}): worst query keeps {number(ratio, 2)} of its original ({query}){held}"


def _prefix(f: Fields) -> str:
    return (
        f"{f['query']} shares its first {f['prefix']} of {f['layers']} layers and keeps {number(f['ratio'], 2)} of "
        "its original"
    )


def _attempt(f: Fields) -> str:
    if "prefix" in f:
        held = "enough" if f["held"] else "too little"
        return f"{f['query']} with {about(f['prefix'], 'frozen layer')} keeps {number(f['ratio'], 2)}: {held}"
    kept, tried = len(f["kept"]), len(f["members"])
    outcome = "the training diverged" if f["diverged"] else f"{kept} of {tried} layers can share"
    return f"round {f['round']}, {_kind(f['group'])}: {outcome}"


def _round(f: Fields) -> str:
    members = f.get("members") or ()
    ratios = f.get("ratios")
    worse = f"; worst query keeps {number(worst(ratios)[1], 2)} of its original" if ratios else ""
    shares = f"{about(len(members), 'layer')} share" if members else "nothing is shared"
    of = f" of at most {size(f['ceiling_bytes'])}" if "ceiling_bytes" in f else ""
    return (
        f"round {f['round']} of {f['rounds']}, {_kind(f['signature'])}: {shares}, {size(f['saved_bytes'])}{of} "
        f"saved so far{worse}"
    )


def _kind(signature: str) -> str:
    return " ".join(signature.split()[:2])


def _test(f: Fields) -> str:
    what = f" {metric(f['metric'])} {number(f['original'])} became {number(f['merged'])}," if "metric" in f else ""
    text = f"{f['query']} on test:{what} {percent(f['ratio'])} of its original"
    met = f["met"] if "met" in f else f["ratio"] is not None and f["ratio"] >= f["target"]
    if not f.get("worth", True):
        return f"{text}; no evidence, since the original is too weak"
    return f"{text}; target {'met' if met else 'missed'}"


def _evaluate(f: Fields) -> str:
    return f"judging {f['query']}, its original beside it, on test"


def _stream(f: Fields) -> str:
    return f"playing the stream to the {f['arm']} in {size(f['memory_bytes'])} of memory ({f['memory']})"


def _profile(f: Fields) -> str:
    return f"measuring what {f['query']} costs on this machine"


SENTENCES: dict[str, Callable[[Fields], str]] = {
    "warning": _warning, "query": _query, "cycle": _cycle, "original": _original, "epoch": _epoch,
    "reference": _reference, "precision": _precision, "layout": _layout, "workers": _workers,
    "crew": _crew, "sums": _sums,
    "ancestry": _ancestry, "equal": _equal, "aligned": _aligned, "start": _start, "rate": _rate,
    "recipe": _recipe, "adopting": _adopting, "takes": _takes, "waits": _waits,
    "accepted": _accepted, "alone": _alone, "repair": _repair,
    "widths": _widths, "prefix": _prefix,
    "attempt": _attempt, "round": _round, "test": _test,
    "evaluate": _evaluate, "stream": _stream, "profile": _profile,
}  # fmt: skip
