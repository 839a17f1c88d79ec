"""The memory settings by their names, and sizes in both systems of units."""

from __future__ import annotations

import pytest

from edge_runtime.scheduler.costs import Costs, QueryCost, memory_bytes, memory_settings, parse_memory
from models.errors import InputError

ORIGINALS = Costs(
    {"a": QueryCost(("a1", "a2"), 0.01, 1000, 0.1), "b": QueryCost(("b1",), 0.01, 5000, 0.1)},
    {"a1": 5120, "a2": 1024, "b1": 512},
    1e6,
)


def test_memory_settings_run_from_the_largest_query_alone_to_everything_at_once():
    settings = memory_settings(ORIGINALS)
    assert settings["min"] == 5120 + 1024 + 1000
    assert settings["all"] == 5120 + 1024 + 512 + 5000
    assert settings["50%"] == settings["min"] + (settings["all"] - settings["min"]) // 2
    assert settings["min"] < settings["50%"] < settings["75%"] < settings["all"]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("512MiB", 512 * 2**20), ("2GB", 2 * 10**9), ("1.5 kib", 1536), ("4096", 4096), (4096, 4096), ("10B", 10)],
)
def test_sizes_are_read_in_both_systems_of_units(text, nbytes):
    assert parse_memory(text) == nbytes


@pytest.mark.parametrize("text", ["", "lots", "512 MiBs", "-1MiB", "0", 0, True, None, 1.5, "1e9", "GB"])
def test_what_is_no_size_is_refused_with_file_key_and_remedy(text):
    with pytest.raises(InputError, match=r"^box\.yaml: budget: .*; write a size"):
        parse_memory(text, "box.yaml", "budget")


def test_a_setting_is_named_or_a_size():
    assert memory_bytes("min", ORIGINALS) == 7144
    assert memory_bytes("1KiB", ORIGINALS) == 1024
