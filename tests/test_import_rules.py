"""The rules of the house hold in every package, and each fails where it is broken (in packages made up here)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house import (
    MAX_FILES,
    MAX_LINES,
    circles,
    doorless_folders,
    empty_names,
    full_folders,
    greedy_functions,
    imports,
    long_files,
    silent_files,
    sources,
    trespasses,
)

BUILT = ("models", "merger", "edge_runtime", "gemel", "video_samples")
FLOORS = {
    "models": set(),
    "video_samples": set(),
    "merger": {"models"},
    "edge_runtime": {"models"},
    "gemel": {"models", "merger", "edge_runtime", "video_samples"},
    "benchmarks": set(BUILT),
    "tests": {*BUILT, "benchmarks"},
}
"""What each package may import."""


@pytest.fixture(scope="module")
def house(repository: Path):
    return sources(repository, FLOORS)


@pytest.fixture(scope="module")
def edges(house):
    return {name: imports(source, house) for name, source in house.items()}


@pytest.fixture(scope="module")
def built(house):
    return [source for source in house.values() if source.package in BUILT]


def test_no_files_import_each_other_in_a_circle(edges):
    assert circles(edges) == []


def test_every_package_imports_only_those_below_it(edges):
    assert trespasses(edges, FLOORS) == []


def test_no_file_is_too_long(house):
    assert long_files(house.values()) == []


def test_no_folder_is_too_full(house):
    assert full_folders(house.values()) == []


def test_no_public_function_takes_too_many_parameters(house):
    asked = [source for source in house.values() if source.package != "tests"]  # those of tests are fixtures
    assert [one for source in asked for one in greedy_functions(source)] == []


def test_every_file_begins_by_saying_what_it_is(house):
    assert silent_files(house.values()) == []


def test_every_folder_that_is_built_has_a_door(built):
    assert doorless_folders(built) == []


def test_every_name_says_what_is_in_it(house):
    assert empty_names(house.values()) == []


def made(root: Path, **files: str):
    """Packages of these files; a file's name is dotted, a door's is its package's with `__init__` at its end."""
    for name, text in files.items():
        path = root.joinpath(*name.split("."))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(text)
    return sources(root, sorted({name.partition(".")[0] for name in files}))


def graph(found):
    return {name: imports(source, found) for name, source in found.items()}


@pytest.mark.parametrize(
    "back",
    [
        "import low.b",
        "from low import b",
        "from low.b import thing",
        "from .b import thing",
        "from . import b",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from low.b import thing",
        "def late():\n    from low.b import thing",
        "from importlib import import_module\nimport_module('low.b')",
    ],
)
def test_a_circle_is_found_whichever_way_a_file_is_imported(tmp_path, back):
    found = made(
        tmp_path, **{"low.__init__": "", "low.a": back, "low.b": "from low.c import x", "low.c": "import low.a"}
    )
    assert circles(graph(found)) == [["low.a", "low.b", "low.c"]]


def test_a_door_that_opens_on_a_file_that_comes_in_by_it_is_a_circle(tmp_path):
    files = {"low.room.__init__": "from low.room.a import x", "low.room.a": "from low.room import b", "low.room.b": ""}
    assert circles(graph(made(tmp_path, **files))) == []
    files["low.room.a"] = "from low.room import y"
    assert circles(graph(made(tmp_path, **files))) == [["low.room", "low.room.a"]]


def test_a_diamond_is_no_circle(tmp_path):
    files = {"low.a": "import low.b\nimport low.c", "low.b": "import low.d", "low.c": "import low.d", "low.d": ""}
    found = graph(made(tmp_path, **files))
    assert found["low.a"] == {"low.b", "low.c"} and circles(found) == []


def test_an_import_from_a_higher_floor_or_the_one_beside_is_named(tmp_path):
    floors = {"low": set(), "left": {"low"}, "right": {"low"}}
    files = {"low.a": "", "left.b": "import low.a", "right.c": "import low.a"}
    assert trespasses(graph(made(tmp_path, **files)), floors) == []
    files |= {"low.a": "def late():\n    import right.c", "left.b": "from right import c"}
    assert trespasses(graph(made(tmp_path, **files)), floors) == ["left.b imports right.c", "low.a imports right.c"]


def test_a_line_or_a_file_too_many_is_counted(tmp_path):
    room = {f"low.f{index}": "x = 1\n" * MAX_LINES for index in range(MAX_FILES)}
    found = made(tmp_path, **room)
    assert long_files(found.values()) == full_folders(found.values()) == []
    found = made(tmp_path, **{"low.f0": "x = 1\n" * (MAX_LINES + 1), "low.more": ""})
    assert long_files(found.values()) == ["low.f0 has 401 lines"]
    assert full_folders(found.values()) == [f"{tmp_path / 'low'} has 15 files"]


def test_a_parameter_too_many_is_counted_with_self_left_out(tmp_path):
    seven, eight = "a, b, c, d, *, e, f, g", "a, b, c, d, *, e, f, g=1, h"
    text = """
def fits({seven}): ...
def greedy({eight}): ...
def _private({eight}): ...
class Kind:
    def __init__(self, {seven}): ...
    def method(self, {eight}): ...
    @staticmethod
    def still(x, {seven}): ...
class _Private:
    def method(self, {eight}): ...
"""
    found = made(tmp_path, **{"low.a": text.format(seven=seven, eight=eight)})
    assert greedy_functions(found["low.a"]) == [
        "low.a.greedy takes 8",
        "low.a.Kind.method takes 8",
        "low.a.Kind.still takes 8",
    ]


def test_silence_a_missing_door_and_an_empty_name_are_told(tmp_path):
    found = made(tmp_path, **{"low.__init__": '"""Low."""', "low.a": "x = 1", "low.room.utils": '"""U."""'}).values()
    assert silent_files(found) == ["low.a"]
    assert doorless_folders(found) == [str(tmp_path / "low" / "room")]
    assert empty_names(found) == ["low.room.utils"]
