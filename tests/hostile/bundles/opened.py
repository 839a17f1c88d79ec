"""A bundle taken apart, changed and sealed again; the commands that open one, and what `verify` says of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from models.bundle.format import DIGEST_KEY
from tests.hostile.harness import tried
from tests.hostile.samples import BUNDLE, OLD

VERIFY = ("bundle", "verify", BUNDLE)
OPENED_BY = {
    "show": ("bundle", "show", BUNDLE),
    "export": ("bundle", "export", BUNDLE, "--query", "a", "-o", "new.onnx"),
    "diff from": ("bundle", "diff", BUNDLE, OLD, "-o", "new.update"),
    "diff to": ("bundle", "diff", OLD, BUNDLE),
    "sign": ("bundle", "sign", BUNDLE, "--key", "box-key"),
    "plan": ("plan", BUNDLE, "--device", "orin-nano-8gb"),
    "simulate": ("simulate", BUNDLE, "--device", "orin-nano-8gb", "--duration", 1),
    "profile": ("profile", BUNDLE, "--device", "cpu"),
    "eval": ("eval", BUNDLE, "workload.yaml", "--out", "new"),
    "run": ("run", "box.yaml", "--check"),
}
ONCE = "plan"
FEW = ("show", "plan", "run")
"""Stands for all that open a bundle where there are many cases."""


def sealed(text: bytes, data: bytes, padded: bool = True) -> bytes:
    """A file with this header, whose `gemel.digest` is zeros, and these bytes."""
    text += b" " * (-(8 + len(text)) % 512 if padded else 0)
    blank = len(text).to_bytes(8, "little") + text
    return blank.replace(b"0" * 64, hashlib.sha256(blank).hexdigest().encode(), 1) + data


def header_text(manifest: str, tensors: dict[str, Any]) -> bytes:
    metadata = {DIGEST_KEY: "0" * 64, "gemel.manifest": manifest}
    return json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()


class Opened:
    """A bundle taken apart: its manifest, its tensors' entries as in the header, its data."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        self.path, self.data = path, content[8 + length :]
        self.tensors: dict[str, Any] = json.loads(content[8 : 8 + length])
        self.manifest: dict[str, Any] = json.loads(self.tensors.pop("__metadata__")["gemel.manifest"])

    def write(self, manifest: str | None = None, text: bytes | None = None) -> None:
        """Put together again, and sealed."""
        said = json.dumps(self.manifest, separators=(",", ":")) if manifest is None else manifest
        self.path.write_bytes(sealed(header_text(said, self.tensors) if text is None else text, self.data))


def told(house: Path, *reasons: str) -> None:
    """`verify` falls short of the bundle, and every line names it."""
    seen = tried(VERIFY, house).held()
    lines = seen.out.splitlines()
    assert (seen.code, seen.err, seen.changed) == (1, "", ()) and lines, seen
    assert all(line.startswith(f"{BUNDLE}: ") and line.isprintable() for line in lines), lines
    for reason in reasons:
        assert any(reason in line for line in lines), (reason, lines)
