"""What a reload must refuse: each kind of bad bundle and config, and a part of its one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tests.edge_runtime.local_box import replace_bundle
from tests.edge_runtime.tiny import LOOPED, query, trained_looking, write_config

BAD = "bad.safetensors"
BREAKING = f"{__name__}:break_process"


def break_process(*_: object, **__: object) -> None:
    """A factory that would end the process."""
    raise SystemExit("and\nmore")


def change_keys(**keys: Any) -> Callable[[Path], object]:
    return lambda folder: write_config(folder, **{"cameras": LOOPED, **keys})


def change_bytes(change: Callable[[bytearray], object]) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        data = bytearray((folder / "tiny.safetensors").read_bytes())
        change(data)
        (folder / BAD).write_bytes(data)
        write_config(folder, cameras=LOOPED, bundle=BAD)

    return write


def change_query(camera: str = "left", factories: tuple[str, ...] = (), **keys: Any) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        replace_bundle(folder / BAD, {"q": trained_looking(1)}, query("q", camera, **keys))
        more = {"factories": list(factories)} if factories else {}
        write_config(folder, cameras=LOOPED, bundle=BAD, **more)

    return write


def require_signature(folder: Path) -> None:
    key = Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    (folder / "key.pub").write_bytes(key)
    write_config(folder, cameras=LOOPED, public_key="key.pub")


BAD_CONFIGS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "box.yaml").unlink(), "cannot be read"),
    "no yaml": (lambda folder: (folder / "box.yaml").write_text("a: ["), "line 1"),
    "a key": (change_keys(frob=1), "frob"),
    "a variable": (change_keys(cameras={"left": {"source": "${NOWHERE}"}}), "NOWHERE"),
    "a budget": (change_keys(budget="9KiB"), "budget"),
    "a sink": (change_keys(sinks=[{"kind": "jsonl", "path": "no/r"}]), "no"),
    "a sink over the bundle": (change_keys(sinks=[{"kind": "jsonl", "path": "tiny.safetensors"}]), "the bundle"),
    "no bundle": (change_keys(bundle="absent"), "cannot be read"),
    "a bit": (change_bytes(lambda data: data.__setitem__(-1, data[-1] ^ 1)), "does not match its content hash"),
    "a header": (change_bytes(lambda data: data.__setitem__(200, data[200] ^ 1)), "is damaged"),
    "a cut": (change_bytes(lambda data: data.__delitem__(slice(-600, None))), "truncated"),
    "a signature": (require_signature, "is not signed"),
    "a factory": (change_query(model="os:getcwd"), "not in the zoo"),
    "a factory that ends the process": (change_query(factories=(BREAKING,), model=BREAKING), "SystemExit"),
    "a camera": (change_query("nowhere"), "needs a camera 'nowhere'"),
    "http": (change_keys(http={"bind": "127.0.0.1:0"}), "http.bind"),
    "a trace": (change_keys(trace="t.jsonl"), "trace"),
    "a spool": (change_keys(spool="elsewhere"), "spool"),
}
