"""Bundles: ONE safetensors file that holds each unique tensor once, and a manifest.

`write_bundle` writes one, `open_bundle` maps one, `verify_bundle` checks every byte of one.
"""

from gemel.models.bundle.manifest import (
    BundleEvidence,
    BundleQuery,
    ByteCounts,
    Manifest,
    Shared,
    StoredTensor,
    Substitution,
    TrainingRecord,
    has_documents,
)
from gemel.models.bundle.reader import Bundle, open_bundle
from gemel.models.bundle.verify import list_unchecked, verify_bundle
from gemel.models.bundle.writer import Made, check_writable, write_bundle, write_substituted
from gemel.models.files.io import check_output

__all__ = [
    "Bundle",
    "BundleEvidence",
    "BundleQuery",
    "ByteCounts",
    "Made",
    "Manifest",
    "Shared",
    "StoredTensor",
    "Substitution",
    "TrainingRecord",
    "check_output",
    "check_writable",
    "has_documents",
    "list_unchecked",
    "open_bundle",
    "verify_bundle",
    "write_bundle",
    "write_substituted",
]
