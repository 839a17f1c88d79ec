"""The import rules hold in every package, and each check fails where its rule is broken (in packages made up here)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.source_rules import (
    MAX_LINES,
    circles,
    files_without_docstring,
    folders_without_init,
    forbidden_imports,
    imports,
    long_files,
    meaningless_names,
    overloaded_functions,
    sources,
)

PRODUCT = ("models", "merger", "edge_runtime", "gemel", "video_samples")
LAYERS = {
    "models": set(),
    "video_samples": set(),
    "merger": {"models"},
    "edge_runtime": {"models"},
    "gemel": {"models", "merger", "edge_runtime", "video_samples"},
    "benchmarks": set(PRODUCT),
    "tests": {*PRODUCT, "benchmarks"},
}
"""What each package may import."""


@pytest.fixture(scope="module")
def files(repository: Path):
    return sources(repository, LAYERS)


@pytest.fixture(scope="module")
def edges(files):
    return {name: imports(source, files) for name, source in files.items()}


@pytest.fixture(scope="module")
def product(files):
    return [source for source in files.values() if source.package in PRODUCT]


def test_imports_form_no_circle(edges):
    assert circles(edges) == []


def test_packages_import_only_lower_layers(edges):
    assert forbidden_imports(edges, LAYERS) == []


def test_files_are_at_most_800_lines(files):
    assert long_files(files.values()) == []


def test_public_functions_take_at_most_nine_parameters(product):
    assert [found for source in product for found in overloaded_functions(source)] == []


def test_files_begin_with_a_docstring(files):
    assert files_without_docstring(files.values()) == []


def test_product_folders_have_an_init(product):
    assert folders_without_init(product) == []


def test_module_names_are_meaningful(files):
    assert meaningless_names(files.values()) == []


def write_packages(root: Path, **files: str):
    """Packages of these files, by dotted name."""
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
def test_circles_any_import_form_is_found(tmp_path, back):
    found = write_packages(
        tmp_path, **{"low.__init__": "", "low.a": back, "low.b": "from low.c import x", "low.c": "import low.a"}
    )
    assert circles(graph(found)) == [["low.a", "low.b", "low.c"]]


def test_circles_init_and_its_module_is_found(tmp_path):
    files = {
        "low.inner.__init__": "from low.inner.a import x",
        "low.inner.a": "from low.inner import b",
        "low.inner.b": "",
    }
    assert circles(graph(write_packages(tmp_path, **files))) == []
    files["low.inner.a"] = "from low.inner import y"
    assert circles(graph(write_packages(tmp_path, **files))) == [["low.inner", "low.inner.a"]]


def test_circles_diamond_is_none(tmp_path):
    files = {"low.a": "import low.b\nimport low.c", "low.b": "import low.d", "low.c": "import low.d", "low.d": ""}
    found = graph(write_packages(tmp_path, **files))
    assert found["low.a"] == {"low.b", "low.c"} and circles(found) == []


def test_forbidden_imports_upward_or_sideways_are_named(tmp_path):
    layers = {"low": set(), "left": {"low"}, "right": {"low"}}
    files = {"low.a": "", "left.b": "import low.a", "right.c": "import low.a"}
    assert forbidden_imports(graph(write_packages(tmp_path, **files)), layers) == []
    files |= {"low.a": "def late():\n    import right.c", "left.b": "from right import c"}
    assert forbidden_imports(graph(write_packages(tmp_path, **files)), layers) == [
        "left.b imports right.c",
        "low.a imports right.c",
    ]


def test_long_files_beyond_the_limit_are_counted(tmp_path):
    found = write_packages(tmp_path, **{"low.a": "x = 1\n" * MAX_LINES, "low.b": "x = 1\n" * (MAX_LINES + 1)})
    assert long_files(found.values()) == [f"low.b has {MAX_LINES + 1} lines"]


def test_overloaded_functions_self_is_not_counted(tmp_path):
    nine, ten = "a, b, c, d, *, e, f, g, h, i", "a, b, c, d, *, e, f, g=1, h, i, j"
    text = """
def fits({nine}): ...
def greedy({ten}): ...
def _private({ten}): ...
class Kind:
    def __init__(self, {nine}): ...
    def method(self, {ten}): ...
    @staticmethod
    def still(x, {nine}): ...
class _Private:
    def method(self, {ten}): ...
"""
    found = write_packages(tmp_path, **{"low.a": text.format(nine=nine, ten=ten)})
    assert overloaded_functions(found["low.a"]) == [
        "low.a.greedy takes 10",
        "low.a.Kind.method takes 10",
        "low.a.Kind.still takes 10",
    ]


def test_missing_docstring_init_and_name_are_found(tmp_path):
    found = write_packages(
        tmp_path, **{"low.__init__": '"""Low."""', "low.a": "x = 1", "low.inner.utils": '"""U."""'}
    ).values()
    assert files_without_docstring(found) == ["low.a"]
    assert folders_without_init(found) == [str(tmp_path / "low" / "inner")]
    assert meaningless_names(found) == ["low.inner.utils"]
