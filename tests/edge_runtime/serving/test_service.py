"""What the thread that oversees a box does beside watching it."""

from __future__ import annotations

import gc
import socket
import threading
from pathlib import Path

import pytest

from edge_runtime import service
from edge_runtime.daemon import run
from edge_runtime.http.app import check_address
from models.errors import InputError
from tests.edge_runtime.tiny import tiny_bundle, write_clip, write_config, write_folder

TIMEOUT_S = 60.0


def test_service_returns_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_bundle(tmp_path / "tiny.safetensors")
    write_clip(tmp_path / "left.mp4", 12)
    write_folder(tmp_path / "right", 10)
    cameras = {"left": {"source": "left.mp4", "loop": True}, "right": {"source": "right", "fps": 12, "loop": True}}
    stop, given_back = threading.Event(), []

    def give_back() -> bool:
        given_back.append(gc.get_freeze_count())
        stop.set()
        return True

    monkeypatch.setattr(service, "TIDY_INTERVAL_S", 0.0)
    monkeypatch.setattr(service, "trim_heap", give_back)
    run(write_config(tmp_path, cameras=cameras), stop=stop, seconds=TIMEOUT_S)
    assert given_back[0] > gc.get_freeze_count() == 0, (
        "what it consists of is looked through once, and let go at the end"
    )


def test_service_with_used_address_is_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_bundle(tmp_path / "tiny.safetensors")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        bind = "127.0.0.1:{1}".format(*other.getsockname())

        def check(*given) -> None:
            check_address(*given)
            other.listen()

        monkeypatch.setattr("edge_runtime.http.app.check_address", check)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(InputError, match=r"http.bind: .* is not available"):
            run(write_config(tmp_path, http={"bind": bind}, spool="spool"))
    assert not (tmp_path / "results.jsonl").exists() and not list((tmp_path / "spool").iterdir())
