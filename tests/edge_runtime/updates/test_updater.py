"""Updates that a box pulls, from real servers: taken, refused, taken back, and whole at every moment."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gemel.cli import main
from gemel.edge_runtime.life.config import load_config
from gemel.edge_runtime.life.daemon import run
from gemel.edge_runtime.updates import update_exchange
from gemel.edge_runtime.updates import updater as updates
from gemel.edge_runtime.updates.update_history import UpdateHistory, read_history
from gemel.edge_runtime.updates.updater import UpdateState, file_digest, recover_update
from gemel.models.bundle.delta import write_update
from gemel.models.bundle.signing import sign_bundle
from gemel.models.errors import InputError
from gemel.models.files.io import locked_folder
from tests.edge_runtime.local_box import LocalBox
from tests.edge_runtime.tiny import LOOPED, write_box, write_config
from tests.edge_runtime.update_fixture import Fixture, kill_rollbacks, kill_updates, make_bundle, make_keys
from tests.edge_runtime.update_server import UpdateServer

KILLS = 20


@pytest.fixture
def puller(tmp_path: Path) -> Fixture:
    return Fixture(tmp_path)


def test_update_is_taken_tried_and_accepted(puller: Fixture) -> None:
    puller.server.files["/box.safetensors"] = puller.old
    puller.run(60)
    assert puller.present == "old" and not puller.reloads and puller.updater.trouble is None
    assert puller.updater.to_json()["state"] == UpdateState.CURRENT
    puller.server.files["/box.safetensors"] = puller.new
    puller.updater._next_poll = 0.0
    puller.run(5)
    assert puller.present == "new" and puller.reloads == ["new"] and puller.updater.to_json()["trial"] is not None
    assert puller.updater.to_json()["state"] == UpdateState.ON_TRIAL
    puller.run(120)
    assert puller.history.trial is None and puller.present == "new" and len(puller.reloads) == 1
    asked = len(puller.server.asked)
    puller.updater.poll()
    assert puller.server.asked[asked:] == [("HEAD", "/box.safetensors")], "a known tag is not loaded again"
    puller.server.files["/box.safetensors"] = puller.old
    puller.updater.poll()
    assert "has the number 1, and 2 has served here" in str(puller.updater.trouble) and puller.present == "new"
    assert puller.updater.to_json()["state"] == UpdateState.REFUSED


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 406, 500, 501])
def test_update_is_taken_from_a_server_that_knows_get_alone(puller: Fixture, status: int) -> None:
    puller.server.head_status = status
    puller.server.files["/box.safetensors"] = puller.new
    puller.run(5)
    assert puller.present == "new" and puller.updater.trouble is None
    puller.run(120)
    sent = len(puller.server.statuses)
    puller.updater.poll()
    assert puller.server.statuses[sent:] == [status, 304], "nothing is sent again"


def test_update_server_that_refuses_head_and_get_is_trouble(puller: Fixture) -> None:
    puller.server.head_status = 500
    puller.server.files.pop("/box.safetensors", None)
    puller.run(5)
    assert puller.present == "old" and "the update server answers 404" in str(puller.updater.trouble)


def test_update_comes_as_a_delta_where_one_is_offered(puller: Fixture, tmp_path: Path) -> None:
    write_update(tmp_path / "old.safetensors", tmp_path / "new.safetensors", tmp_path / "delta")
    digest = file_digest(tmp_path / "old.safetensors")
    puller.server.files["/box.safetensors"] = puller.new
    puller.server.files[f"/box.safetensors.from-{digest[:12]}"] = (tmp_path / "delta").read_bytes()
    puller.updater.poll()
    assert puller.present == "new" and ("GET", "/box.safetensors") not in puller.server.asked


@pytest.mark.parametrize(
    ("more", "reason"), [({"failed": 40}, "without failure than before"), ({"late": 20}, "in time than before")]
)
def test_update_is_taken_back_where_a_query_gets_worse(puller: Fixture, more: dict[str, int], reason: str) -> None:
    puller.server.files["/box.safetensors"] = puller.new
    puller.updater._next_poll = 2800.0
    puller.run(1800)
    assert puller.present == "new"
    puller.run(95, **more)
    assert puller.present == "old" and puller.reloads == ["new", "old"] and puller.history.trial is None
    (why,) = puller.updater.to_json()["refused"].values()
    assert reason in why
    puller.files.memory.unlink()
    restarted = puller.build()
    restarted.poll()
    assert "was taken back before" in str(restarted.trouble) and puller.present == "old"


@pytest.mark.parametrize("more", [{"failed": 40}, {"late": 20}], ids=str)
def test_update_taken_back_as_late_alone_comes_again_after_a_day(
    puller: Fixture, more: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    puller.server.files["/box.safetensors"] = puller.new
    puller.updater._next_poll = 2800.0
    puller.run(1800)
    puller.run(95, **more)
    now = time.time()
    monkeypatch.setattr(updates.time, "time", lambda: now + updates.DAY_S + 1)
    assert puller.present == "old"
    puller.now += updates.DAY_S
    puller.run(5)
    assert puller.present == ("new" if "late" in more else "old")


def fail_on_trial(puller: Fixture) -> None:
    """Let an update fail on trial; its offer stays."""
    puller.server.files["/box.safetensors"] = puller.new
    puller.run(5)
    puller.problems["gate"] = "cannot run"
    puller.run(5)
    puller.problems.clear()
    assert puller.present == "old"


def test_update_that_failed_on_trial_is_tried_again_once_it_is_signed_again(puller: Fixture) -> None:
    fail_on_trial(puller)
    puller.now += 10 * updates.DAY_S
    puller.run(700)
    told = puller.updater.to_json()
    assert puller.present == "old" and (told["state"], told["why"]) == (UpdateState.REFUSED, "query gate: cannot run")
    path = puller.folder / "new.safetensors"
    release = sign_bundle(path, puller.private)
    puller.new = puller.server.files["/box.safetensors"] = path.read_bytes()
    puller.updater._next_poll = 0.0
    puller.run(5)
    assert puller.present == "new" and puller.updater.to_json()["state"] == UpdateState.ON_TRIAL
    puller.run(120)
    assert puller.present == "new" and puller.updater.to_json()["state"] == UpdateState.CURRENT
    assert puller.history.highest == release.sequence and puller.updater.to_json()["why"] is None


def test_update_that_failed_on_trial_is_refused_no_more_once_a_person_installs_it(puller: Fixture) -> None:
    fail_on_trial(puller)
    restarted = puller.build()
    restarted.poll()
    told = restarted.to_json()
    assert told["state"] == UpdateState.REFUSED and told["since"] <= time.time() and told["refused"]
    puller.files.bundle.write_bytes(puller.new)
    restarted.poll()
    told = restarted.to_json()
    assert puller.present == "new" and not puller.history.refused and puller.history.highest == 2
    assert (told["state"], told["why"], told["since"]) == (UpdateState.CURRENT, None, None)
    later = puller.offer("third", 3)
    puller.now += puller.config.every_s
    restarted.poll()
    assert puller.files.bundle.read_bytes() == later, "the next offer is tried"


def test_lateness_is_not_the_fault_of_an_update_on_an_overloaded_box(puller: Fixture) -> None:
    puller.server.files["/box.safetensors"] = puller.new
    puller.updater._next_poll = 2800.0
    puller.row["dropped"] = {"deadline": 0}
    for _ in range(360):
        puller.row["dropped"]["deadline"] += 10
        puller.run(5)
    assert puller.present == "new"
    puller.run(120, late=40)
    assert puller.present == "new" and puller.history.trial is None


def test_lateness_is_not_the_fault_of_an_update_where_more_is_asked(puller: Fixture) -> None:
    puller.server.files["/box.safetensors"] = puller.new
    puller.updater._next_poll = 2800.0
    puller.run(1800)
    puller.run(120, processed=100, late=50)
    assert puller.present == "new" and puller.history.trial is None


def test_trial_counts_from_the_end_of_a_slow_reload_and_anew_after_a_restart(puller: Fixture) -> None:
    puller.server.files["/box.safetensors"] = puller.new
    puller.reload_s = 200.0
    puller.updater.poll()
    puller.run(5)
    assert puller.history.trial is not None
    puller.updater, puller.now = puller.build(), puller.now + 3600.0
    puller.run(95)
    assert puller.history.trial is not None
    puller.run(10)
    assert puller.history.trial is None and puller.present == "new"


def test_update_is_taken_back_where_a_query_drifts(puller: Fixture) -> None:
    puller.server.files["/box.safetensors"] = puller.new
    puller.problems["other"] = "known before"
    puller.updater.poll()
    puller.run(20)
    assert puller.present == "new"
    puller.problems["gate"] = "the drift check finds it below its target"
    puller.run(5)
    assert puller.present == "old"


def test_update_that_the_box_refuses_is_taken_back(puller: Fixture) -> None:
    puller.server.files["/box.safetensors"] = puller.new
    puller.answers.append("query 'gate' has no camera")
    puller.updater.poll()
    assert puller.present == "old" and "no camera" in str(puller.updater.to_json()["refused"])
    assert puller.updater.to_json()["state"] == UpdateState.REFUSED


@pytest.mark.parametrize("fault", ["unsigned", "another key", "damaged", "cut", "stall", "nothing", "no file"])
def test_wrong_offer_changes_nothing(puller: Fixture, fault: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(update_exchange, "STALL_TIMEOUT_S", 0.3)
    (other := tmp_path / "other").mkdir()
    offers = {
        "unsigned": lambda: make_bundle(other, "b", 3, None),
        "another key": lambda: make_bundle(other, "b", 3, make_keys(other)[0]),
        "damaged": lambda: puller.new[:-40] + bytes([puller.new[-40] ^ 1]) + puller.new[-39:],
        "nothing": lambda: b"",
        "no file": lambda: b"<html>not found</html>",
    }
    puller.server.files["/box.safetensors"] = offers.get(fault, lambda: puller.new)()
    puller.server.fault = fault if fault in ("cut", "stall") else ""
    puller.updater.poll()
    assert puller.present == "old" and not puller.reloads and puller.updater.trouble is not None
    puller.server.fault, puller.server.files["/box.safetensors"] = "", puller.new
    puller.now += updates.DAY_S
    puller.updater.poll()
    assert puller.present == "new", "the next good offer is taken"


def test_download_that_broke_off_goes_on_where_it_was(puller: Fixture) -> None:
    puller.server.files["/box.safetensors"], puller.server.fault = puller.new, "cut"
    sizes = [0]
    for _ in range(2):
        puller.updater.poll()
        assert puller.present == "old" and puller.updater.memory.failures == 1, "a part came: no longer pause"
        (part,) = puller.updater.files.folder.glob("*.part")
        sizes.append(part.stat().st_size)
        puller.now += 3 * puller.updater.config.every_s
    assert 0 < sizes[1] < sizes[2] < len(puller.new)
    puller.server.fault = ""
    puller.updater.poll()
    assert puller.present == "new" and puller.server.statuses.count(206) == 2
    assert not list(puller.updater.files.folder.glob("*.part"))


def test_download_begins_anew_where_the_offer_has_changed(puller: Fixture, tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    puller.server.files["/box.safetensors"], puller.server.fault = make_bundle(other, "b", 5, puller.private), "cut"
    puller.updater.poll()
    puller.server.files["/box.safetensors"], puller.server.fault = puller.new, ""
    puller.now += updates.DAY_S
    puller.updater.poll()
    assert puller.present == "new" and 206 not in puller.server.statuses
    assert not list(puller.updater.files.folder.glob("*.part"))


def test_accepted_update_is_rolled_back_by_hand_once(puller: Fixture) -> None:
    asked = puller.updater.roll_back()
    puller.run(5)
    with pytest.raises(InputError, match="no update has replaced one here"):
        asked.result(0)
    puller.server.files["/box.safetensors"] = puller.new
    puller.updater._next_poll = 0.0
    puller.run(130)
    assert puller.present == "new" and puller.history.trial is None
    twice = [puller.updater.roll_back() for _ in range(2)]
    puller.run(5)
    assert {one.result(0) for one in twice} == {file_digest(puller.folder / "old.safetensors")}
    assert puller.present == "old" and puller.reloads == ["new", "old"] and puller.history.trial is None
    told = puller.updater.to_json()
    assert (told["state"], told["why"]) == ("refused", "taken back by hand") and told["since"] <= time.time()
    puller.updater._next_poll = 0.0
    puller.run(5)
    restarted = puller.build()
    restarted.poll()
    assert puller.present == "old" and restarted.to_json()["why"] == "taken back by hand"
    asked = puller.updater.roll_back()
    puller.run(5)
    with pytest.raises(InputError, match="is the bundle before the last update already"):
        asked.result(0)


def test_update_on_trial_is_rolled_back_by_hand(puller: Fixture) -> None:
    puller.server.files["/box.safetensors"] = puller.new
    puller.run(5)
    asked = puller.updater.roll_back()
    puller.run(5)
    assert asked.result(0) and puller.present == "old" and list(puller.history.refused.values()) == [updates.BY_HAND]
    puller.updater.stop()
    with pytest.raises(InputError, match="the box stops"):
        puller.updater.roll_back().result(0)


def test_box_that_is_off_is_rolled_back_on_its_files(puller: Fixture, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(
        puller.folder, bundle="box.safetensors", cameras={"left": {"source": "${NOWHERE}"}}, spool="spool",
        updates={"url": puller.server.address, "public_key": "key.pub"},
    )  # fmt: skip
    assert main(["rollback", str(path)]) == 1 and "no update has replaced one here" in capsys.readouterr().out
    puller.server.files["/box.safetensors"] = puller.new
    puller.run(5)
    assert main(["rollback", str(path)]) == 0 and puller.present == "old" and puller.history.trial is None
    assert "the bundle before the last update serves" in capsys.readouterr().out
    assert main(["rollback", str(path)]) == 1 and "update already" in capsys.readouterr().out
    with locked_folder(puller.folder / "spool"):
        assert main(["rollback", str(path)]) == 2
    assert "a box that runs takes this by HTTP, with a token" in capsys.readouterr().err
    write_config(puller.folder, bundle="box.safetensors", cameras={}, spool="spool")
    assert main(["rollback", str(path)]) == 2 and "its bundles come from no server" in capsys.readouterr().err


def test_bundle_that_ends_the_box_is_taken_back_at_a_start(puller: Fixture) -> None:
    puller.server.files["/box.safetensors"] = puller.new
    puller.updater.poll()
    spool, bundle = puller.folder / "spool", puller.folder / "box.safetensors"
    assert [recover_update(spool, bundle) for _ in range(updates.MAX_STARTS)] == [False] * updates.MAX_STARTS
    assert recover_update(spool, bundle) and puller.present == "old" and not recover_update(spool, bundle)


def test_bundle_is_old_or_new_whenever_the_process_is_killed(puller: Fixture) -> None:
    """Killed at random lines of an update (`make faults` does so 200 times)."""
    kill_updates(puller, KILLS)


def test_rollback_is_done_or_not_begun_whenever_the_process_is_killed(puller: Fixture) -> None:
    assert 0 < kill_rollbacks(puller, KILLS) < KILLS


def test_running_box_pulls_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "TICK_S", 0.05)
    write_box(tmp_path)
    private, _ = make_keys(tmp_path)
    server = UpdateServer()
    keys = {"url": f"{server.address}/b", "public_key": "key.pub", "every_s": 1, "watch_s": 1}
    config = write_config(tmp_path, cameras=LOOPED, spool="spool", updates=keys)
    server.files["/b"] = make_bundle(tmp_path, "new.safetensors", 9, private)
    digest = file_digest(tmp_path / "new.safetensors")
    with LocalBox(config) as box:
        box.until(lambda: any(one["bundle"] == digest[:12] for one in box.records("gate")))
        history = tmp_path / "spool" / "updates" / "history.json"
        box.until(lambda: read_history(history) == UpdateHistory(highest=9))
    assert box.summary["fault"] is None and box.summary["balanced"]


def test_updates_need_a_public_key(tmp_path: Path) -> None:
    write_box(tmp_path)
    private, _ = make_keys(tmp_path)
    for name, problem in (("gone.pub", "cannot be read"), (private.name, "is no public key")):
        updates_keys = {"url": "http://u/b", "public_key": name}
        with pytest.raises(InputError, match=problem):
            run(write_config(tmp_path, spool="spool", updates=updates_keys), check=True)


def test_updates_need_a_spool(tmp_path: Path) -> None:
    write_box(tmp_path)
    config = write_config(tmp_path, updates={"url": "http://u/b", "public_key": "key.pub"})
    with pytest.raises(InputError, match=r"updates: .* there is none; add `spool"):
        load_config(config)
