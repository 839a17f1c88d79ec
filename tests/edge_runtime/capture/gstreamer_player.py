"""Plays a pipeline that ends in an appsink: run by the system's python3, with the pipeline and a file for the pixels.

Prints the width, the height and the seconds of each frame since the first, as JSON.
"""

from __future__ import annotations

import json
import sys

import gi  # pyright: ignore[reportMissingImports]

gi.require_version("Gst", "1.0")
from gi.repository import Gst  # noqa: E402  # pyright: ignore[reportMissingImports]


def main(description: str, target: str) -> None:
    """Play to the end."""
    Gst.init(None)
    pipeline = Gst.parse_launch(description)
    pipeline.set_state(Gst.State.PLAYING)
    sink = pipeline.iterate_sinks().next()[1]
    times_s, size = [], (0, 0)
    with open(target, "wb") as file:
        while (sample := sink.emit("pull-sample")) is not None:
            form = sample.get_caps().get_structure(0)
            size = form.get_value("width"), form.get_value("height")
            buffer = sample.get_buffer()
            times_s.append(buffer.pts / Gst.SECOND)
            file.write(buffer.extract_dup(0, buffer.get_size()))
    pipeline.set_state(Gst.State.NULL)
    print(json.dumps([*size, [time_s - times_s[0] for time_s in times_s]]))


if __name__ == "__main__":
    main(*sys.argv[1:])
