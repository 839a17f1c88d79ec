"""What a reload must refuse: each kind of bad bundle and config, and what its one line says."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tests.edge_runtime.reloading.running import write
from tests.edge_runtime.tiny import query, trained_looking, write_config

CAMERAS = {"left": {"source": "left.mp4", "loop": True}, "right": {"source": "right", "fps": 12, "loop": True}}


def flip_bit(folder: Path) -> None:
    data = bytearray((folder / "tiny.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "bad.safetensors").write_bytes(data)
    write_config(folder, cameras=CAMERAS, bundle="bad.safetensors")


def headless(folder: Path) -> None:
    data = bytearray((folder / "tiny.safetensors").read_bytes())
    data[200] ^= 1
    (folder / "bad.safetensors").write_bytes(data)
    write_config(folder, cameras=CAMERAS, bundle="bad.safetensors")


def cut(folder: Path) -> None:
    (folder / "bad.safetensors").write_bytes((folder / "tiny.safetensors").read_bytes()[:-600])
    write_config(folder, cameras=CAMERAS, bundle="bad.safetensors")


def require_signature(folder: Path) -> None:
    (folder / "key.pub").write_bytes(
        Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    )
    write_config(folder, cameras=CAMERAS, public_key="key.pub")


def foreign(folder: Path) -> None:
    write(folder / "bad.safetensors", {"q": trained_looking(1)}, query("q", "left", model="os:getcwd"))
    write_config(folder, cameras=CAMERAS, bundle="bad.safetensors")


def elsewhere(folder: Path) -> None:
    write(folder / "bad.safetensors", {"q": trained_looking(1)}, query("q", "nowhere"))
    write_config(folder, cameras=CAMERAS, bundle="bad.safetensors")


def raising(folder: Path) -> None:
    write(folder / "bad.safetensors", {"q": trained_looking(1)}, query("q", "left", model=f"{__name__}:leaves"))
    write_config(folder, cameras=CAMERAS, bundle="bad.safetensors", factories=[f"{__name__}:leaves"])


def leaves(*_: object, **__: object) -> None:
    """A factory that would end the process."""
    raise SystemExit("and\nmore")


WRONG = {
    "no config": (lambda folder: (folder / "box.yaml").unlink(), "cannot be read"),
    "no yaml": (lambda folder: (folder / "box.yaml").write_text("a: ["), "line 1"),
    "a key": (lambda folder: write_config(folder, cameras=CAMERAS, frob=1), "frob"),
    "a variable": (lambda folder: write_config(folder, cameras={"left": {"source": "${NOWHERE}"}}), "NOWHERE"),
    "a budget": (lambda folder: write_config(folder, cameras=CAMERAS, budget="9KiB"), "budget"),
    "a sink": (lambda folder: write_config(folder, cameras=CAMERAS, sinks=[{"kind": "jsonl", "path": "no/r"}]), "no"),
    "a sink over the bundle": (
        lambda folder: write_config(folder, cameras=CAMERAS, sinks=[{"kind": "jsonl", "path": "tiny.safetensors"}]),
        "the bundle",
    ),
    "no bundle": (lambda folder: write_config(folder, cameras=CAMERAS, bundle="absent"), "cannot be read"),
    "a bit": (flip_bit, "does not match its content hash"),
    "a header": (headless, "is damaged"),
    "a cut": (cut, "truncated"),
    "a signature": (require_signature, "is not signed"),
    "a factory": (foreign, "not in the zoo"),
    "a factory that ends the process": (raising, "SystemExit"),
    "a camera": (elsewhere, "needs a camera 'nowhere'"),
    "http": (lambda folder: write_config(folder, cameras=CAMERAS, http={"bind": "127.0.0.1:0"}), "http.bind"),
    "a trace": (lambda folder: write_config(folder, cameras=CAMERAS, trace="t.jsonl"), "trace"),
    "a spool": (lambda folder: write_config(folder, cameras=CAMERAS, spool="elsewhere"), "spool"),
}
