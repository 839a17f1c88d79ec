"""`gemel bundle diff | apply | sign | verify --public-key`: an update goes to a box, and the box knows whose it is."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from gemel.cli import main
from gemel.models.bundle import Made, write_bundle
from tests.edge_runtime.tiny import query, tiny_bundle, trained_looking


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`old.safetensors`, a box's, and `new.safetensors`, in which one query is another."""
    tiny_bundle(tmp_path / "old.safetensors")
    torch.manual_seed(5)
    models = {"left-kind": trained_looking(0), "right-kind": trained_looking(7)}
    queries = [query("left-kind", "left"), query("right-kind", "right")]
    write_bundle(tmp_path / "new.safetensors", models, queries, Made("new", "none", 0))
    return tmp_path


def run_bundle(capsys: pytest.CaptureFixture[str], *command: object, code: int = 0) -> dict:
    """What a command says with --json."""
    assert main(["bundle", *map(str, command), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_an_update_takes_the_box_to_the_new_bundle(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, update, made = (folder / name for name in ("old.safetensors", "new.safetensors", "update", "made"))
    counted = run_bundle(capsys, "diff", old, new)
    assert not update.exists()
    assert run_bundle(capsys, "diff", old, new, "-o", update)["bytes"] == counted["bytes"] == update.stat().st_size
    run_bundle(capsys, "apply", old, update, "-o", made)
    assert made.read_bytes() == new.read_bytes()


def test_sign_with_key_of_ssh_keygen(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, bundle = folder / "box-key", folder / "new.safetensors"
    try:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    except FileNotFoundError:
        pytest.skip("ssh-keygen is not here")
    asked = ("verify", bundle, "--public-key", f"{key}.pub")
    assert run_bundle(capsys, *asked, code=1)["problems"] == ["is not signed"]
    assert run_bundle(capsys, "sign", bundle, "--key", key)["signed"]
    assert run_bundle(capsys, *asked)["ok"]
    more = ("--sequence", 12, "--valid-until", "2099-12-31")
    signed = run_bundle(capsys, "sign", bundle, "--key", key, *more)
    assert (signed["sequence"], signed["valid_until"]) == (12, 4_102_444_799)
    before = bundle.read_bytes()
    assert main(["bundle", "sign", str(bundle), "--key", str(key), "--valid-until", "2001-01-01"]) == 2
    assert bundle.read_bytes() == before and "is over" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["old.safetensors", "new.safetensors"])
def test_an_update_is_not_written_over_a_bundle(folder: Path, out: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / out).read_bytes()
    old, new = folder / "old.safetensors", folder / "new.safetensors"
    assert main(["bundle", "diff", str(old), str(new), "-o", str(folder / out)]) == 2
    assert (folder / out).read_bytes() == before and capsys.readouterr().err.count("\n") == 1
