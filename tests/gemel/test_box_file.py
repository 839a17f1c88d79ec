"""`gemel run BUNDLE --camera NAME=SOURCE` serves by a config that it writes beside the bundle."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from gemel.box_file import write_box_file
from gemel.cli import main
from gemel.edge_runtime.life.config import load_config
from gemel.models.errors import InputError
from tests.gemel.test_run import box  # noqa: F401


def test_a_bundle_runs_by_the_config_that_is_written(box, capsys):  # noqa: F811
    bundle = box / "tiny.safetensors"
    assert main(["run", str(bundle), "--camera", f"gate={box / 'gate.mp4'}", "--check", "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert checked["ok"] is True and [camera["id"] for camera in checked["cameras"]] == ["gate"]
    written = load_config(box / "tiny.safetensors.box.yaml")
    assert written.bundle == bundle and written.cameras["gate"].source == str(box / "gate.mp4")
    assert written.memory_bytes is not None and written.http is not None


def test_the_shown_config_runs_from_another_folder_and_hides_passwords(box, tmp_path, capsys, caplog):  # noqa: F811
    bundle, shown, written = box / "tiny.safetensors", tmp_path / "shown.yaml", box / "tiny.safetensors.box.yaml"
    assert main(["run", str(bundle), "--camera", f"gate={box / 'gate.mp4'}", "--check"]) == 0
    text = capsys.readouterr().err
    shown.write_text(text[: text.rindex(":8080\n") + len(":8080\n")])
    assert replace(load_config(shown), path=written) == load_config(written)
    words = ["--check", "--log-format", "json"]
    assert main(["run", str(bundle), "--camera", f"gate={box / 'gate.mp4'}", *words]) == 0
    (message,) = [one for one in caplog.messages if "this command stands for" in one]
    assert message.partition("the config ")[2] in text and "cameras:" not in capsys.readouterr().err
    main(["run", str(bundle), "--camera", "gate=rtsp://user:hush@127.0.0.1:1/live", "--check"])
    told = capsys.readouterr()
    assert "rtsp://127.0.0.1:1/live" in told.err and "hush" not in told.out + told.err
    assert "user:hush@" in written.read_text()


@pytest.mark.parametrize(("cameras", "problem"), [
    (["gate"], "'gate' is not NAME=SOURCE"),
    (["yard=a.mp4"], "looks at 'yard'; choose of: gate"),
    (["gate=a.mp4", "gate=b.mp4"], "'gate' is given twice"),
    (["yard=a.mp4"], "gate of .* has no source; add gate=SOURCE"),
    ([], "gate of .* has no source; add gate=SOURCE"),
])  # fmt: skip
def test_wrong_cameras_are_one_line_and_nothing_is_written(box, cameras, problem):  # noqa: F811
    path = box / "tiny.safetensors.box.yaml"
    path.unlink(missing_ok=True)
    with pytest.raises(InputError) as caught:
        write_box_file(box / "tiny.safetensors", cameras)
    assert re.search(problem, "\n".join(map(str, (caught.value, *caught.value.others))))
    assert not path.exists()
