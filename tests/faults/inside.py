"""A box in this process, box.yaml of the current folder, that writes every minute what it holds.

Usage: python -m tests.faults.inside; it imports nothing that a box does not.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time
from typing import Any

from gemel.cli import main as run_command
from gemel.edge_runtime.events.clips import ClipRecorder, PacketRing
from gemel.edge_runtime.events.stage import EventStage
from gemel.models.process import use_one_arena

INSIDE_INTERVAL_S, INSIDE_FILE = 60.0, "inside.jsonl"


class HeapUse(ctypes.Structure):
    """`struct mallinfo2` of mallinfo(3), bytes over all arenas."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    ))  # fmt: skip


def measure_inside(objects: dict[str, list[Any]]) -> dict[str, Any]:
    """What this process, a box, holds: its C heap in use, free and in mappings, Python's blocks, its buffers."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = HeapUse
    heap = library.mallinfo2()
    rings, stages = objects["PacketRing"], objects["EventStage"]
    thumbnails = [picture for stage in stages for picture in list(stage._thumbnails.values())]
    return {
        "heap_used": heap.uordblks, "heap_free": heap.fordblks, "heap_mapped": heap.hblkhd,
        "blocks": sys.getallocatedblocks(),
        "ring_packets": sum(len(ring._packets) for ring in rings), "ring_bytes": sum(ring._nbytes for ring in rings),
        "events": sum(len(stage._recent) for stage in stages), "thumbnails": len(thumbnails),
        "thumbnail_bytes": sum(map(len, thumbnails)), "clips": sum(len(one._clips) for one in objects["ClipRecorder"]),
    }  # fmt: skip


def main() -> None:
    """A box in this process that writes every minute what it holds."""
    objects: dict[str, list[Any]] = {one.__name__: [] for one in (PacketRing, EventStage, ClipRecorder)}

    def keep(owner: type) -> None:
        begin: Any = owner.__init__  # type: ignore[misc]

        def begin_kept(self: Any, *given: Any, **named: Any) -> None:
            objects[owner.__name__].append(self)
            begin(self, *given, **named)

        setattr(owner, "__init__", begin_kept)  # noqa: B010

    def write() -> None:
        began = time.monotonic()
        while True:
            time.sleep(INSIDE_INTERVAL_S)
            row = {"at": round(time.monotonic() - began, 1), **measure_inside(objects)}
            with open(INSIDE_FILE, "a") as file:
                file.write(json.dumps(row) + "\n")

    for owner in (PacketRing, EventStage, ClipRecorder):
        keep(owner)
    use_one_arena()  # as the installed command does, which this module stands for
    threading.Thread(target=write, name="watching", daemon=True).start()
    sys.exit(run_command(["run", "box.yaml"]))


if __name__ == "__main__":
    main()
