"""What needs no torch does not import it: it takes seconds and hundreds of megabytes on a box."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from gemel.models.bundle.delta import write_update
from tests.edge_runtime.tiny import tiny_bundle, write_config

HEAVY = {"torch", "torchvision", "onnx", "onnxruntime", "scipy", "cv2", "av", "aiohttp", "matplotlib", "jinja2"}
IN_ONE_PROCESS = """
import json, sys
from gemel.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as ended:
    code = ended.code
print(json.dumps([code, sorted(sys.modules)]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two bundles, an update between them, a private key, and a config whose device is left to the box."""
    made = tmp_path_factory.mktemp("light")
    for name in ("tiny", "new"):
        tiny_bundle(made / f"{name}.safetensors")
    write_update(made / "tiny.safetensors", made / "new.safetensors", made / "update")
    key = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    (made / "key").write_bytes(key)
    (made / "token").write_text("a-token-of-32-characters-or-more")
    write_config(made, device="auto", http={"bind": "127.0.0.1:1", "token_file": "token"})
    return made


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("--help", 0),
        ("service install box.yaml -o unit", 0),
        ("reload box.yaml", 2),
        ("bundle show tiny.safetensors", 0),
        ("bundle diff tiny.safetensors new.safetensors -o there", 0),
        ("bundle apply tiny.safetensors update -o applied.safetensors", 0),
        ("bundle sign new.safetensors --key key", 0),
    ],
)
def test_light_command_imports_nothing_heavy(folder: Path, command: str, code: int) -> None:
    run = [sys.executable, "-c", IN_ONE_PROCESS, *command.split()]
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    ended, modules = json.loads(done.stdout.splitlines()[-1])
    assert ended == code, done.stderr
    assert not HEAVY & set(modules)
