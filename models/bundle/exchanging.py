"""The same bundle with other weights for some of its queries; what is not exchanged stays as it is, byte by byte."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from models.bundle.manifest import BundleQuery, Manifest
from models.bundle.reader import Bundle
from models.bundle.writer import Made, write_bundle

if TYPE_CHECKING:
    from torch import nn

    from models.parts.widths import Packed


@dataclass(frozen=True, eq=False)
class Part:
    """A query as it goes into a bundle: its record, without tensors, its model, and which tensors are stored packed."""

    record: BundleQuery
    model: nn.Module
    packed: Mapping[str, Packed] = field(default_factory=dict)

    @classmethod
    def of(cls, bundle: Bundle, query_id: str) -> Part:
        """A query as it is in a bundle; BundleError where its tensors don't fit its architecture."""
        query = bundle.query(query_id)
        packed = {key: bundle.packed_tensor(query_id, key) for key in query.stored}
        bare = dataclasses.replace(query, tensors={}, residuals={}, stored={})
        return cls(bare, bundle.build(query_id), packed)


def write_exchanged(path: str | Path, bundle: Bundle, others: Mapping[str, Part]) -> Manifest:
    """Write the bundle with these parts in place of its own; returns the manifest.

    Raises InputError, with nothing written, as `write_bundle` does.
    """
    parts = [others.get(query.id) or Part.of(bundle, query.id) for query in bundle.queries]
    old = bundle.manifest
    return write_bundle(
        path,
        {part.record.id: part.model for part in parts},
        [part.record for part in parts],
        Made(old.workload, old.method, old.bytes.ceiling),
        packed={part.record.id: part.packed for part in parts},
    )
