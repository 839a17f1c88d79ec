"""Graphs prepared once: what is in the cache, when it is trusted, and what happens where a query cannot be prepared."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from gemel.edge_runtime.engines import prepare, prepared
from gemel.edge_runtime.engines.prepare import find_prepared, prepare_bundle
from gemel.edge_runtime.engines.prepared import INDEX, WEIGHTS, PreparedBundle, verify_contents
from gemel.models.bundle import Bundle, open_bundle
from gemel.models.errors import InputError
from tests.edge_runtime.engines.prepared_bundles import contents_read_by, copy_prepared, read_index, rewrite_index
from tests.edge_runtime.tiny import FACTORY, tiny_bundle


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """A folder for caches, of this module alone."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def use_cache(cache, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Bundle:
    return tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny.gemel", documents=True)


@pytest.fixture
def ready(bundle) -> PreparedBundle:
    """The bundle's graphs, prepared by the first test that asks."""
    return prepare_bundle(bundle)


def test_prepared_weights_are_equal_ones_once(ready, bundle):
    tied = 9 * 12 * 48 * 4
    shared = contents_read_by(ready.index, "gate", "yard")
    assert [ready.index.contents[one].nbytes for one in shared] == [tied]
    assert ready.index.contents[0].nbytes == tied, "what most queries read comes first"
    readers = Counter(content for query in ready.index.queries.values() for content in query.reads)
    assert set(readers.values()) == {1, 2}
    assert ready.index.weights_bytes == (ready.folder / WEIGHTS).stat().st_size
    assert ready.index.weights_bytes % 4096 == 0
    assert ready.index.failed == {} and set(ready.index.queries) == {"gate", "yard", "road"}
    assert verify_contents(ready) == []


def test_what_one_query_reads_alone_begins_at_a_page(ready):
    for queries in (["gate", "yard"], ["road"]):
        offsets = [ready.index.contents[one].offset for one in contents_read_by(ready.index, *queries)]
        assert min(offsets) % 4096 == 0


def test_graphs_keep_shared_convolutions_apart_from_norms_and_fold_private_ones(ready):
    convolutions = {}
    for query in ("gate", "road"):
        model = onnx.load(ready.folder / ready.index.queries[query].file, load_external_data=False)
        convolutions[query] = sum(node.op_type == "Conv" for node in model.graph.node)
    assert convolutions == {"gate": 3, "road": 2}


def test_prepared_files_are_read_only_and_this_users(ready):
    for path in ready.folder.iterdir():
        assert path.stat().st_mode & 0o777 == 0o400
    assert ready.folder.stat().st_mode & 0o777 == 0o700
    assert (ready.folder.parent.parent / "prepared.key").stat().st_mode & 0o777 == 0o600


def test_a_second_start_takes_what_is_there(ready, bundle, monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)
    again = prepare_bundle(bundle)
    assert again.folder == ready.folder and again.index == ready.index


def test_a_preparation_takes_no_torch_and_tells_its_peak(ready):
    assert 30 << 20 < ready.index.peak_bytes < 250 << 20, "with torch it were more than 300 MB"
    assert ready.index.queries["gate"].workspace.keys() == {1, 4}


DAMAGE = {
    "an index of another key": ("not written with this user's key", lambda folder: None),
    "weights that were cut short": ("bytes instead of", lambda folder: os.truncate(folder / WEIGHTS, 4096)),
    "no weights": ("weights.bin is missing", lambda folder: (folder / WEIGHTS).unlink()),
    "weights that others may write": ("not this user's own", lambda folder: (folder / WEIGHTS).chmod(0o622)),
    "a changed graph": ("0.onnx is damaged", lambda folder: (folder / "0.onnx").write_bytes(b"")),
    "a link for a graph": ("cannot be read", lambda folder: link_elsewhere(folder / "0.onnx")),
    "another version": ("another version", lambda folder: rewrite_index(folder, replace(read_index(folder), format=0))),
    "another bundle": ("another version", lambda folder: rewrite_index(folder, replace(read_index(folder), key="0"))),
}  # fmt: skip


def link_elsewhere(path: Path) -> None:
    other = path.with_suffix(".other")
    path.rename(other)
    path.symlink_to(other)


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_cannot_be_trusted_is_said_and_prepared_anew(ready, bundle, monkeypatch, caplog, tmp_path, damage):
    reason, change = DAMAGE[damage]
    cache = tmp_path / "gemel"
    cache.mkdir(mode=0o700)
    if "another key" not in damage:
        shutil.copy(ready.folder.parent.parent / "prepared.key", cache)
    folder = copy_prepared(ready, cache / "prepared" / ready.folder.name)
    change(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_prepared(bundle) is None
    assert reason in caplog.text and "\n" not in caplog.messages[-1]


def test_a_damaged_folder_is_replaced(ready, bundle, monkeypatch, tmp_path):
    cache = tmp_path / "gemel"
    cache.mkdir(mode=0o700)
    folder = copy_prepared(ready, cache / "prepared" / ready.folder.name)
    (folder / INDEX).write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mapped = (folder / WEIGHTS).open("rb")
    again = prepare_bundle(bundle)
    assert again.folder == folder and again.index.contents == ready.index.contents
    assert os.fstat(mapped.fileno()).st_nlink == 0, "a box that maps the old file keeps it"
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(prepared.MAKING)]


def test_folders_used_longest_ago_are_removed(ready):
    others = [ready.folder.with_name(f"{place:032x}") for place in range(6)]
    for place, other in enumerate(others):
        other.mkdir()
        os.utime(other, (place, place))
    prepared.remove_old(ready.folder)
    assert [other.exists() for other in others] == [False] * 3 + [True] * 3
    assert ready.folder.exists()
    for other in others[3:]:
        other.rmdir()


def test_damaged_contents_are_found(ready, tmp_path):
    folder = copy_prepared(ready, tmp_path / "copy")
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[100] ^= 1
    (folder / WEIGHTS).write_bytes(data)
    (problem,) = verify_contents(PreparedBundle(folder, ready.index))
    assert "at 0 are damaged; remove the folder" in problem


def test_a_bundle_without_networks_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds no networks"):
        prepare_bundle(tiny_bundle(tmp_path / "old.gemel"))


def test_a_disk_without_room_is_said_before_anything_is_written(bundle, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(prepare.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"has 1 bytes free, and preparing .* takes up to"):
        prepare_bundle(bundle)
    assert not [path for path in (tmp_path / "gemel" / "prepared").iterdir() if path.is_dir()]


def test_a_damaged_tensor_is_refused(bundle, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "damaged.gemel"
    shutil.copy(bundle.path, path)
    damaged = open_bundle(path, [FACTORY])
    entry = damaged.header.entries[damaged.query("road").tensors["3.weight"]]
    with open(path, "r+b") as file:
        file.seek(damaged.header.data_start + entry.begin)
        file.write(b"\0\0\0\0")
    index = prepare_bundle(open_bundle(path, [FACTORY])).index
    assert set(index.queries) == {"gate", "yard"} and "is damaged" in index.failed["road"]


CRASHING = """
import os, signal, sys
from gemel.edge_runtime.engines import prepare_child
plain = prepare_child.optimise
def optimise(query, *others):
    if query.id == "yard":
        os.kill(os.getpid(), signal.SIGSEGV)
    return plain(query, *others)
prepare_child.optimise = optimise
sys.exit(prepare_child.main(sys.argv[1:]))
"""


def test_a_query_that_ends_the_process_leaves_the_others_theirs(bundle, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plain = subprocess.run

    def run(command, **others):
        return plain([command[0], "-c", CRASHING, *command[3:]], **others)

    monkeypatch.setattr(prepare.subprocess, "run", run)
    index = prepare_bundle(bundle).index
    assert set(index.queries) == {"gate", "road"}
    assert index.failed == {"yard": "the process ended with SIGSEGV"}
