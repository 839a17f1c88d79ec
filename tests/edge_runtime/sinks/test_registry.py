"""A kind of sink is one file and one entry point: this file adds one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest

from gemel.edge_runtime.life.config import load_config
from gemel.edge_runtime.life.daemon import run
from gemel.edge_runtime.sinks.base import ResultMessage, Sink, SinkConfig
from gemel.models.errors import InputError
from tests.distributions import install
from tests.edge_runtime.tiny import tiny_bundle, write_clip, write_config, write_folder

KEPT: dict[str, list[Mapping[str, Any]]] = {}
CLOSED: list[str] = []


class KeeperConfig(SinkConfig):
    kind: Literal["kept"]
    under: str

    def build(self) -> Keeper:
        KEPT[self.under] = []
        return Keeper(self.under)


class Keeper(Sink):
    def __init__(self, under: str) -> None:
        self._under = under

    def write(self, messages: Sequence[ResultMessage]) -> None:
        KEPT[self._under] += [message.record for message in messages]

    def close(self) -> None:
        CLOSED.append(self._under)


@pytest.fixture(autouse=True)
def _stranger(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {"gemel.sinks": {"kept": f"{__name__}:KeeperConfig"}}
    install(tmp_path_factory.mktemp("site"), monkeypatch, "gemel-keeper", entries)


def test_box_writes_to_an_added_kind_of_sink(tmp_path):
    tiny_bundle(tmp_path / "tiny.safetensors")
    write_clip(tmp_path / "left.mp4", 4)
    write_folder(tmp_path / "right", 3)
    sinks = [{"kind": "kept", "under": "here"}, {"kind": "jsonl", "path": "too.jsonl"}]
    summary = run(write_config(tmp_path, sinks=sinks))
    processed = sum(account["processed"] for account in summary["ledger"])
    assert len(KEPT["here"]) == processed == len((tmp_path / "too.jsonl").read_text().splitlines()) > 0
    assert CLOSED == ["here"]


@pytest.mark.parametrize(
    ("sink", "key", "fault"),
    [
        ({"kind": "kept"}, "sinks[1].under", "missing"),
        ({"kind": "kept", "under": "x", "path": "y"}, "sinks[1].path", "unknown key"),
        ({"kind": "jsonl", "path": 3}, "sinks[1].path", "path"),
        ({"kind": "fax"}, "sinks[1].kind", "there is no sink 'fax'; choose one of: jsonl, mqtt, webhook, kept"),
        ({"path": "y"}, "sinks[1].kind", "missing"),
    ],
)
def test_sink_keys_are_checked_by_kind(tmp_path, sink, key, fault):
    path = write_config(tmp_path, sinks=[{"kind": "jsonl"}, sink])
    with pytest.raises(InputError) as error:
        load_config(path)
    text = str(error.value)
    assert text.startswith(f"{path}: {key}: ") and fault in text
