"""Update servers and disks that hurt: what was taken back stays so, and the bundle that serves is watched."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemel.edge_runtime.life.daemon import run
from gemel.edge_runtime.updates import update_exchange, update_files
from gemel.edge_runtime.updates import updater as updates
from gemel.edge_runtime.updates.update_history import UpdateHistory, UpdateTrial, read_history, write_history
from gemel.edge_runtime.updates.updater import file_digest, recover_update
from gemel.models.errors import InputError
from gemel.models.files.io import locked_folder
from tests.edge_runtime.tiny import write_box, write_config
from tests.edge_runtime.update_fixture import Fixture, make_bundle, make_keys

PATH = "/box.safetensors"
YESTERDAY, TOMORROW = int(time.time()) - 86_400, int(time.time()) + 86_400


@pytest.fixture
def puller(tmp_path: Path) -> Fixture:
    return Fixture(tmp_path)


def take_back(puller: Fixture) -> None:
    """Install the new bundle, and take it back since a query cannot run."""
    puller.server.files[PATH] = puller.new
    puller.updater.poll()
    assert puller.present == "new"
    puller.problems["gate"] = "cannot run"
    puller.run(5)
    assert puller.present == "old" and puller.reloads == ["new", "old"]
    puller.problems.clear()


# What a server says


@pytest.mark.parametrize(
    "tag", ['"' + "A" * 1200 + '"', '"\xff\xfe"', '"' + "\\" * 500 + '"'], ids=["long", "odd", "esc"]
)
def test_history_of_a_strange_etag_remembers_what_was_taken_back(puller: Fixture, tag: str) -> None:
    take_back(puller)
    puller.server.tags[PATH] = tag
    puller.now += updates.DAY_S
    puller.updater.poll()
    puller.server.tags[PATH] = '"3"'
    restarted = puller.build()
    restarted.poll()
    assert puller.present == "old" and "was taken back before" in str(restarted.trouble)
    assert list(puller.history.refused) == [file_digest(puller.folder / "new.safetensors")]


def test_redirect_is_not_followed(puller: Fixture) -> None:
    puller.server.files[PATH] = puller.server.files["/other"] = puller.new
    puller.server.redirects[PATH] = "/other"
    puller.updater.poll()
    assert "answers 302" in str(puller.updater.trouble) and {path for _, path in puller.server.asked} == {PATH}


# The history


@pytest.mark.parametrize("damage", [b"", b"\0" * 80, b"{", b"[]", b'{"refused": {"x": "y"}}', b'{"more": 1}', "folder"])
def test_history_that_is_damaged_asks_a_person(puller: Fixture, damage: bytes | str) -> None:
    take_back(puller)
    path = puller.files.history
    path.unlink()
    path.write_bytes(damage) if isinstance(damage, bytes) else path.mkdir()
    puller.server.tags[PATH] = '"2"'
    downloads = puller.server.downloads()
    for _ in range(2):
        assert not recover_update(puller.folder / "spool", puller.folder / "box.safetensors")
        restarted = puller.build()
        restarted.poll()
        restarted.step()
        trouble = str(restarted.trouble)
        assert "history.json" in trouble and "looked at this file and removed it" in trouble
    assert puller.present == "old" and puller.server.downloads() == downloads
    assert path.read_bytes() == damage if isinstance(damage, bytes) else path.is_dir(), "it is kept"
    path.unlink() if isinstance(damage, bytes) else path.rmdir()
    puller.updater = restarted
    puller.run(5)
    assert puller.present == "new" and restarted.trouble is None


def test_history_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    write_history(path, UpdateHistory(highest=7))
    wrong = UpdateHistory().model_copy(update={"trial": UpdateTrial.model_construct(digest="x" * 2000, previous="")})
    with pytest.raises(InputError, match="could not be read again"):
        write_history(path, wrong)
    assert read_history(path).highest == 7


def test_verdict_of_any_text_is_remembered(puller: Fixture) -> None:
    puller.server.files[PATH] = puller.new
    puller.answers.append("a\0b\ud800 \u202e" + "x" * 2000)
    puller.updater.poll()
    assert puller.present == "old" and len(puller.history.refused) == 1 and puller.history.trial is None


def test_start_of_a_second_box_on_one_spool_counts_no_trial(puller: Fixture) -> None:
    puller.server.files[PATH] = puller.new
    puller.updater.poll()
    with locked_folder(puller.folder / "spool"), pytest.raises(InputError, match="another process"):
        recover_update(puller.folder / "spool", puller.folder / "box.safetensors")
    trial = puller.history.trial
    assert trial is not None and trial.starts == 0


def test_start_after_a_kill_before_the_install_refuses_nothing(puller: Fixture) -> None:
    puller.server.files[PATH] = puller.new
    puller.updater.poll()
    (puller.folder / "box.safetensors").write_bytes(puller.old)
    for _ in range(updates.MAX_STARTS + 1):
        assert not recover_update(puller.folder / "spool", puller.folder / "box.safetensors")
    assert puller.history == UpdateHistory(highest=1) and puller.present == "old"


# Rollback and freeze


@pytest.mark.parametrize("sequence", [1, 2, 3])
def test_bundle_whose_number_is_not_higher_is_not_taken(puller: Fixture, sequence: int) -> None:
    puller.server.files[PATH] = puller.new
    puller.updater.poll()
    puller.run(120)
    offered = puller.offer("third", 3, sequence=sequence)
    puller.now += updates.DAY_S
    puller.updater.poll()
    is_taken = (puller.folder / "box.safetensors").read_bytes() == offered
    assert is_taken == (sequence == 3)
    assert is_taken or f"has the number {sequence}, and 2 has served here" in str(puller.updater.trouble)


def test_bundle_that_came_by_hand_counts(puller: Fixture) -> None:
    """An older one may be put there by hand; a server's must still be above all that have served."""
    for seed in (9, 4):
        make_bundle(puller.folder, "box.safetensors", seed, puller.private)
        puller.updater.poll()
    puller.offer("between", 6)
    puller.updater.poll()
    assert "has the number 6, and 9 has served here" in str(puller.updater.trouble) and not puller.reloads
    taken = puller.offer("higher", 10)
    puller.updater.poll()
    assert (puller.folder / "box.safetensors").read_bytes() == taken


def test_bundle_past_its_end_date_is_not_taken(puller: Fixture) -> None:
    puller.offer("late", 5, valid_until=YESTERDAY)
    puller.updater.poll()
    assert "was signed to serve until" in str(puller.updater.trouble) and puller.present == "old"
    puller.offer("later", 6, valid_until=TOMORROW)
    puller.updater.poll()
    assert len(puller.reloads) == 1 and puller.updater.trouble is None
    assert puller.updater.to_json()["valid_until"] == TOMORROW and puller.updater.to_json()["sequence"] == 6


def test_bundle_past_its_end_date_serves_on_with_trouble(puller: Fixture) -> None:
    """A server that answers, and never has anything new."""
    data = make_bundle(puller.folder, "box.safetensors", 5, puller.private, valid_until=YESTERDAY)
    puller.server.files[PATH] = data
    puller.updater.poll()
    assert "was signed to serve until" in str(puller.updater.trouble) and puller.updater.checked_at is not None
    assert (puller.folder / "box.safetensors").read_bytes() == data and not puller.reloads


def test_server_that_never_answers_is_a_trouble_of_its_own(puller: Fixture) -> None:
    puller.server.files[PATH] = puller.old
    puller.updater.poll()
    assert puller.updater.trouble is None
    puller.now += 3 * updates.DAY_S
    assert "has not answered for 3.0 days" in str(puller.updater.trouble)


# Servers that are slow


@pytest.mark.parametrize("kind", ["HEAD", "GET"])
def test_exchange_that_drips_ends_at_its_deadline(puller: Fixture, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIMEOUT_S", "DOWNLOAD_TIMEOUT_S"):
        monkeypatch.setattr(update_exchange, name, 0.4)
    puller.server.files[PATH], puller.server.slow = puller.new, {kind}
    polling = threading.Thread(target=puller.updater.poll, daemon=True)
    polling.start()
    polling.join(20.0)
    assert not polling.is_alive() and "stalls or hangs up" in str(puller.updater.trouble)
    puller.server.slow = set()


# Disks


@pytest.mark.parametrize("fault", ["endless", "long"])
def test_answer_that_does_not_end_is_cut(puller: Fixture, fault: str) -> None:
    puller.server.files[PATH], puller.server.fault = puller.new, fault
    puller.updater.poll()
    assert puller.updater.trouble is not None and puller.present == "old"
    assert puller.server.sent_bytes < 64 << 20
    assert {path.name for path in puller.files.folder.iterdir()} <= {"server.json", "history.json"}


def test_offer_beyond_four_times_the_bundle_is_not_loaded(puller: Fixture) -> None:
    puller.server.files[PATH] = bytes(4 * len(puller.old) + 1)
    puller.updater.poll()
    assert "4 times the present bundle has" in str(puller.updater.trouble)


def test_offer_without_room_is_not_loaded(puller: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_files, "RESERVE_BYTES", 1 << 60)
    puller.server.files[PATH] = puller.new
    puller.updater.poll()
    assert "there is room for" in str(puller.updater.trouble) and not puller.files.offer.exists()


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A folder that cannot be written, also not by root."""
    if os.geteuid():
        folder.chmod(0o500)
        yield
        folder.chmod(0o700)
        return
    try:
        for options in (("--bind", folder, folder), ("-o", "remount,bind,ro", folder)):
            subprocess.run(["mount", *options], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("nothing can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)  # the bundle may still be mapped


def test_bundle_in_a_read_only_folder_is_never_loaded(puller: Fixture) -> None:
    (puller.folder / "ro").mkdir()
    bundle = puller.folder / "ro" / "box.safetensors"
    bundle.write_bytes(puller.old)
    puller.files = updates.UpdateFolder(puller.folder / "spool", bundle)
    bundle.with_name(".box.safetensors.0.tmp").write_bytes(b"left by a kill")
    puller.server.files[PATH] = puller.new
    with read_only(puller.folder / "ro"):
        updater = puller.build()
        for _ in range(4):
            updater.poll()
            puller.now += updates.DAY_S
        assert "no update can replace it" in str(updater.trouble)
        assert puller.server.downloads() == 0 and puller.history.trial is None


def test_check_of_updates_into_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    (folder := tmp_path / "box").mkdir()
    write_box(folder)
    make_keys(folder)
    updates_keys = {"url": "http://127.0.0.1:9/b", "public_key": "key.pub"}
    sinks = [{"kind": "jsonl", "path": str(tmp_path / "results.jsonl")}]
    config = write_config(folder, spool=str(tmp_path / "spool"), updates=updates_keys, sinks=sinks)
    with read_only(folder), pytest.raises(InputError, match=r"no update can replace it.*/data") as caught:
        run(config, check=True)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


@contextlib.contextmanager
def mount_file(path: Path) -> Iterator[None]:
    """A file that is a mount point, as of a container that is given single files: nothing can be renamed to it."""
    try:
        subprocess.run(["mount", "--bind", path, path], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("nothing can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


@contextlib.contextmanager
def in_the_way(path: Path) -> Iterator[None]:
    """A folder in place of a file."""
    path.mkdir()
    yield
    path.rmdir()


@pytest.mark.parametrize("fault", ["rename", "previous"])
def test_install_that_fails_is_tried_again_later_and_later(puller: Fixture, fault: str) -> None:
    puller.server.files[PATH] = puller.new
    hurt = mount_file(puller.files.bundle) if fault == "rename" else in_the_way(puller.files.previous)
    with hurt:
        for _ in range(3):
            puller.updater.poll()
        assert puller.server.downloads() == 1 and puller.present == "old" and puller.history.trial is None
        puller.updater = puller.build()
        puller.updater.poll()
        assert puller.server.downloads() == 1, "also after a start"
        waits = []
        for _ in range(3):
            begun, before = puller.now, puller.server.downloads()
            while puller.server.downloads() == before:
                puller.now += 60.0
                puller.updater.poll()
            waits.append(puller.now - begun)
        assert waits[0] >= 600 and waits[1] > 1.4 * waits[0] and waits[2] > 1.4 * waits[1]
    puller.now += 2 * updates.DAY_S
    puller.updater.poll()
    assert puller.present == "new" and puller.updater.trouble is None


def test_start_removes_only_its_own_temporaries(puller: Fixture) -> None:
    other = puller.folder / ".0123456789abcdef.tmp"
    other.write_bytes(b"of another program")
    (puller.files.folder / ".offer.safetensors.0.tmp").write_bytes(b"left by a kill")
    (puller.files.folder / ".fedcba9876543210.tmp").mkdir()
    puller.build()
    assert other.exists() and not (puller.files.folder / ".offer.safetensors.0.tmp").exists()


def test_bad_bundle_is_taken_back_where_nothing_can_be_remembered(puller: Fixture) -> None:
    puller.server.files[PATH] = puller.new
    puller.updater.poll()
    puller.files.history.unlink()
    puller.files.history.mkdir()
    puller.problems["gate"] = "cannot run"
    with pytest.raises(InputError):
        puller.run(5)
    assert puller.present == "old" and puller.reloads == ["new", "old"]
    puller.files.history.rmdir()
    puller.run(90)
    assert len(puller.history.refused) == 1 and puller.history.trial is None and puller.present == "old"


def test_bad_bundle_is_taken_back_once_the_box_reloads(puller: Fixture) -> None:
    puller.server.files[PATH] = puller.new
    puller.updater.poll()
    puller.problems["gate"] = "cannot run"
    puller.answers = ["the config is no YAML", None]
    with pytest.raises(InputError, match="does not reload"):
        puller.run(5)
    puller.run(90)
    assert puller.reloads == ["new", "old", "old"] and puller.history.trial is None
