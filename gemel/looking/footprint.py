"""Where a bundle's bytes lie: what each query brings, what is shared, what its models really take in memory."""

from __future__ import annotations

from typing import Any

from models.bits import FP32, WEIGHTS
from models.bundle import Bundle
from models.bundle.manifest import original_bytes


def shared_of(bundle: Bundle) -> list[dict[str, Any]]:
    """Every weight that stands at two or more places, with its size and who uses it where."""
    return [
        {
            "tensor": one.tensor,
            "bytes": bundle.nbytes(one.tensor),
            "shape": list(bundle.header.entries[one.tensor].shape),
            "members": [list(member) for member in one.members],
        }
        for one in bundle.manifest.shared
        if len(bundle.header.entries[one.tensor].shape) > 1
    ]


def bytes_of(bundle: Bundle) -> dict[str, Any]:
    """Bytes before and after, in all and by query, as stored.

    A tensor used by n queries counts 1/n for each (`shared_part`), so the parts of all queries add up to `after`.
    """
    users: dict[str, set[str]] = {}
    for query in bundle.queries:
        for name in query.places().values():
            users.setdefault(name, set()).add(query.id)
    rows = []
    for query in bundle.queries:
        residual = {name for one in query.residuals.values() for name in (one.a, one.b)}
        plain = set(query.tensors.values()) - residual
        rows.append({
            "query": query.id,
            "model": query.model,
            "before": original_bytes(query, bundle.header.entries),
            "shared_part": sum(bundle.nbytes(name) / len(users[name]) for name in plain if len(users[name]) > 1),
            "private": sum(bundle.nbytes(name) for name in plain if len(users[name]) == 1),
            "residual": sum(bundle.nbytes(name) for name in residual),
        })  # fmt: skip
    counts = bundle.manifest.bytes
    return {
        "before": counts.before,
        "after": counts.after,
        "ceiling": counts.ceiling,
        "saved_fraction": 1 - counts.after / counts.before,
        "ceiling_fraction": counts.ceiling / counts.before,
        "stored": stored_of(bundle),
        "queries": rows,
    }


def stored_of(bundle: Bundle) -> dict[str, int]:
    """How the bytes of the weights are stored: dtype (fp32, fp16, int8 ...) -> bytes, scales with what they scale."""
    found = {dtype: dict[str, int]() for dtype in WEIGHTS}
    for query in bundle.queries:
        for key, name in query.state().items():
            own = query.stored.get(key)
            found[own.dtype if own is not None else FP32][name] = bundle.nbytes(name)
            if own is not None and own.scale is not None:
                found[own.dtype][own.scale] = bundle.nbytes(own.scale)
    return {dtype: sum(sizes.values()) for dtype, sizes in found.items() if sizes}


def resident_bytes(bundle: Bundle) -> int:
    """Bytes of the unique memory behind all queries' models, built side by side; packed weights as a box holds them."""
    found: dict[int, int] = {}
    for query in bundle.queries:
        model = bundle.build(query.id).state_dict()
        held = [tensor for key, tensor in model.items() if key not in query.stored]
        places = query.places()
        held += [bundle.tensor(places[key]) for key in places if key in query.stored or key not in model]
        found |= {tensor.data_ptr(): tensor.nbytes for tensor in held}
    return sum(found.values())
