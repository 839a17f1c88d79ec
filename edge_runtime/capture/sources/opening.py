"""Which source a camera gets."""

from __future__ import annotations

from pathlib import Path

from edge_runtime.capture.settings import CameraConfig
from edge_runtime.capture.sources.base import Source
from edge_runtime.capture.sources.ffmpeg import FFmpegSource
from edge_runtime.capture.sources.folder import FolderSource
from edge_runtime.capture.sources.gstreamer import GStreamerSource, has_gstreamer
from edge_runtime.capture.sources.opencv import OpenCVSource
from models.video import SCHEMES

AUTO, PYAV, OPENCV, GSTREAMER = "auto", "pyav", "opencv", "gstreamer"
DECODERS = (AUTO, PYAV, OPENCV, GSTREAMER)


def open_source(config: CameraConfig) -> Source:
    """Open a camera's source before its first frame; raises SourceLost. It may take long: `timeout_s` or more."""
    if not config.live and Path(config.source).is_dir():
        return FolderSource(Path(config.source))
    match config.decoder:
        case "gstreamer":
            return GStreamerSource(config)
        case "opencv":
            return OpenCVSource(config)
        case "auto" if config.is_device:
            return OpenCVSource(config)
        case _:
            return FFmpegSource(config)


def config_fault(config: CameraConfig) -> tuple[str, str, str] | None:
    """What can never work, whatever the camera does: the key, the fault and its remedy; None if nothing."""
    scheme = config.source.partition("://")[0].lower()
    if config.is_address and scheme not in SCHEMES:
        return "source", "this kind of address is not one of a camera", f"begin with {', '.join(SCHEMES)}"
    if config.decoder not in DECODERS:
        return "decoder", f"unknown decoder '{config.decoder}'", f"use {', '.join(DECODERS)}"
    if config.decoder == OPENCV and config.is_address:
        return "decoder", "opencv opens files and devices, no addresses", "use pyav"
    if config.decoder == GSTREAMER and config.is_device:
        return "decoder", "gstreamer opens files and addresses, no devices", "use opencv"
    if config.decoder == GSTREAMER and not has_gstreamer():
        return "decoder", "OpenCV was built without GStreamer here", "use pyav, or the OpenCV that JetPack brings"
    return None
