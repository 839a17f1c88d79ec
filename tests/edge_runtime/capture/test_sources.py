"""The source of each camera, and the options its decoder gets."""

from __future__ import annotations

import pytest

from edge_runtime.capture.sources import (
    NO_ANSWER,
    CameraConfig,
    SourceLost,
    gstreamer_pipeline,
    open_source,
    probe_cameras,
)
from tests.edge_runtime.capture.faulty_cameras import RtspCamera
from tests.edge_runtime.tiny import picture, write_folder

ABSENT_DEVICE = "987"


def test_probe_of_missing_device_prints_nothing(capfd):
    found = probe_cameras([CameraConfig("c", ABSENT_DEVICE)])["c"]
    assert found.image is None and found.problem
    assert capfd.readouterr() == ("", "")


def test_source_errors_name_files_but_no_addresses(tmp_path):
    with pytest.raises(SourceLost, match="there is no "):
        open_source(CameraConfig("c", str(tmp_path / "gone.mp4")))
    with pytest.raises(SourceLost) as error:
        open_source(CameraConfig("c", "rtsp://user:secret@127.0.0.1:9/secret?secret"))
    assert str(error.value) == "it cannot be opened: Connection refused"
    assert error.value.__cause__ is None and error.value.__suppress_context__


def test_gstreamer_pipeline_quotes_the_address():
    pipeline = gstreamer_pipeline(CameraConfig("c", 'rtsp://u:p"w\\@box/1 ! filesink location=x', timeout_s=2.5))
    assert pipeline.startswith('rtspsrc location="rtsp://u:p\\"w\\\\@box/1 ! filesink location=x" protocols=tcp ')
    assert "tcp-timeout=2500000" in pipeline and pipeline.endswith("drop=true")
    assert gstreamer_pipeline(CameraConfig("c", "http://box/1")).startswith('souphttpsrc location="http://box/1" ')
    of_file = gstreamer_pipeline(CameraConfig("c", "/clips/a.mp4"))
    assert of_file.startswith('filesrc location="/clips/a.mp4" ') and "drop" not in of_file


def test_probe_cameras_in_parallel_with_timeout(tmp_path):
    folder = write_folder(tmp_path / "f", 1)
    (folder / "0.png").write_bytes(b"no image")
    with RtspCamera() as silent:
        silent.silent = True
        found = probe_cameras([CameraConfig("late", silent.url), CameraConfig("folder", str(folder))], 0.5)
    image = found["folder"].image
    assert image is not None and (image == picture(100)).all(), "the first that decodes"
    assert found["late"].to_json() == {"answers": False, "error": NO_ANSWER}
