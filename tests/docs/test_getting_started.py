"""docs/getting-started.md: its blocks run in order in an empty folder."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gemel.cli import main
from gemel.models import zoo
from tests.docs.pages import REPOSITORY

PAGE = (REPOSITORY / "docs" / "getting-started.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)(?: file=(\S+))?\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, int], dict[str, Any]]]:
    """The folder after every block of the page, the exit code of each command, and the names of the last script."""
    folder = tmp_path_factory.mktemp("getting-started")
    torch.manual_seed(0)
    detector = zoo.build("ssdlite320_mobilenet_v3_large", ["person"], input_size=96, task="detection")
    torch.save(detector.state_dict(), folder / "person.pth")  # the page's reader has one
    codes: dict[str, int] = {}
    names: dict[str, Any] = {"frame": np.zeros((64, 64, 3), np.uint8)}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        for language, file, content in BLOCKS:
            if file:
                (folder / file).write_text(content)
                if file == "make_up.py":
                    exec(compile(content, file, "exec"), {"__name__": "__main__"})
            elif language == "sh":
                for line in content.splitlines():
                    codes[line] = main(shlex.split(line)[1:])
            else:
                exec(compile(content, "getting-started", "exec"), names)
        sys.modules.pop("nets", None)
    yield folder, codes, names


def test_getting_started_commands_succeed(results: tuple[Path, dict[str, int], dict[str, Any]]) -> None:
    _, codes, _ = results
    assert {line.split()[1] for line in codes} >= {"inspect", "merge", "bundle", "run"}
    assert set(codes.values()) == {0}, codes


def test_getting_started_box_answers_both_queries(results: tuple[Path, dict[str, int], dict[str, Any]]) -> None:
    folder, _, _ = results
    records = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert {record["query"] for record in records} == {"door", "lamp"}
    assert {record["label"] for record in records} <= {"open", "closed", "on", "off"}
    assert len({record["label"] for record in records}) == 4


def test_getting_started_bundle_is_smaller(results: tuple[Path, dict[str, int], dict[str, Any]]) -> None:
    folder, _, _ = results
    merged = (folder / "box.safetensors").stat().st_size
    assert merged < sum((folder / f"{name}.pth").stat().st_size for name in ("door", "lamp"))


def test_getting_started_equal_detector_is_stored_once(results: tuple[Path, dict[str, int], dict[str, Any]]) -> None:
    folder, _, _ = results
    assert (folder / "two.safetensors").stat().st_size < 1.25 * (folder / "person.pth").stat().st_size


def test_getting_started_model_is_a_module(results: tuple[Path, dict[str, int], dict[str, Any]]) -> None:
    _, _, names = results
    assert isinstance(names["model"], torch.nn.Module) and names["answer"].shape == (1, 2)
