"""What a box config says of one camera, and what a query wants of it."""

from __future__ import annotations

from dataclasses import dataclass

from models.video import is_path

TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class CameraConfig:
    """One camera: `source` is an absolute path, a URL or a device index; `fps` None means the source's own.

    A frame that takes longer than `timeout_s` seconds to come means that the camera is lost. `decoder` is a name of
    `edge_runtime.capture.sources.opening.DECODERS`, or auto.
    """

    id: str
    source: str
    fps: float | None = None
    loop: bool = False
    decoder: str = "auto"
    timeout_s: float = TIMEOUT_S

    @property
    def is_address(self) -> bool:
        """Whether the source is a URL."""
        return "://" in self.source

    @property
    def is_device(self) -> bool:
        """Whether the source is the index of a device of this machine."""
        return self.live and not self.is_address

    @property
    def live(self) -> bool:
        """Whether frames come at the camera's pace, not as fast as they are asked for."""
        return not is_path(self.source)

    @property
    def forever(self) -> bool:
        """Whether a camera that is lost is tried again until the box stops."""
        return self.live or self.loop


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a query wants of its camera: frames a second (None: all), and the region x0, y0, x1, y1 in pixels."""

    fps: float | None = None
    roi: tuple[float, float, float, float] | None = None
