"""Decoding of a stream's packets, in hardware where that proves itself, else on the processor."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gemel.edge_runtime.capture.skipping import FrameSkipper, Skip
from gemel.models.files.rgb import to_planar
from gemel.models.files.video import reason_of

if TYPE_CHECKING:
    import av

AUTO, CPU = "auto", "cpu"


@dataclass(frozen=True, slots=True)
class Accelerator:
    """How FFmpeg reaches decoders in hardware: by a device beside its own decoders, or by names with this ending."""

    device: str | None = None
    ending: str = ""


ACCELERATORS = {
    "vaapi": Accelerator("vaapi"),
    "qsv": Accelerator("qsv", "_qsv"),
    "cuda": Accelerator("cuda"),
    "v4l2m2m": Accelerator(ending="_v4l2m2m"),
}
TRIED = ("vaapi", "qsv", "v4l2m2m")
"""What `auto` tries. A CUDA context takes hundreds of megabytes beside every budget: `cuda` needs its name."""
MAX_SILENT_PACKETS = 24
"""Packets without a frame after which a decoder counts as gone, or as unfit before its first."""
MAX_KEPT_BYTES = 32 * 2**20
"""Packets since the last key frame, from which the processor goes on: 25 s at 10 Mbit/s."""
RETRY_S = 600.0
"""After which hardware that failed is tried again, by the next connection."""


class DecoderLost(Exception):
    """A decoder in hardware cannot be had, or is of no use any more; the text is the reason."""


class Failures:
    """Hardware of this process that failed lately, by kind and codec. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._failed: dict[tuple[str, str], tuple[float, str]] = {}

    def add(self, kind: str, codec: str, reason: str) -> None:
        """Remember a failure."""
        with self._lock:
            self._failed[kind, codec] = self._clock(), reason

    def reason(self, kind: str, codec: str) -> str | None:
        """Why this is not tried now; None where it may be."""
        with self._lock:
            at, reason = self._failed.get((kind, codec), (0.0, ""))
        return reason if reason and self._clock() < at + RETRY_S else None


_FAILURES = Failures()


def open_hardware(kind: str, software: Any) -> Any:
    """A decoder of this kind for the stream of PyAV's codec context `software`; DecoderLost where there is none."""
    import av
    from av.codec.codec import UnknownCodecError
    from av.codec.hwaccel import HWAccel

    accelerator, codec = ACCELERATORS[kind], software.codec.canonical_name
    device = None
    try:
        if accelerator.device is not None:
            device = HWAccel(accelerator.device, allow_software_fallback=False)
        context = av.CodecContext.create(codec + accelerator.ending, "r", device)
        context.thread_count, context.extradata, context.options = 1, software.extradata, software.options
        if device is None or context.is_hwaccel:
            context.open()
            return context
    except UnknownCodecError:
        pass
    except Exception as error:  # a driver can fail in any way
        raise DecoderLost(reason_of(error)) from None
    raise DecoderLost(f"there is no such decoder for {codec} here")


class PacketDecoder:
    """Decodes the packets of PyAV's `stream`; `name` is CPU or the kind of hardware that does it at present.

    Hardware serves once it has given a frame with the same bits as the processor, which decodes beside it until then.
    Where it fails later, the processor goes on from the last key frame. `note` gets that, once; `skipped` is called for
    packets that are left out on purpose.
    """

    def __init__(
        self,
        stream: Any,
        kind: str,
        skipper: FrameSkipper,
        note: Callable[..., object],
        skipped: Callable[[], object] = lambda: None,
        failures: Failures = _FAILURES,
    ) -> None:
        import av.video.reformatter

        self.name, self.skipper = CPU, skipper
        self._software, self._note, self._skipped, self._failures = stream.codec_context, note, skipped, failures
        self._codec: str = self._software.codec.canonical_name
        self._reformatter = av.video.reformatter.VideoReformatter()
        self._hardware: Any = None
        self._kind = kind
        self._since_key: list[Any] = []
        self._kept_bytes = self._silent = 0
        self._fails = False
        self._last_pts: int | None = None
        self._expected: dict[int | None, int] = {}
        self._early: list[av.VideoFrame] = []
        if kind != CPU:
            self._open(TRIED if kind == AUTO else (kind,))

    @property
    def size(self) -> tuple[int, int] | None:
        """Width and height of the stream; None before they are known."""
        width, height = self._software.width, self._software.height
        return (width, height) if width and height else None

    def __call__(self, packet: Any) -> Sequence[av.VideoFrame]:
        """The frames of the next packet; FFmpeg's errors as they are, those of hardware excepted."""
        if packet.size and not self._skip(packet):
            return []
        self._fails = True
        if self._hardware is None:
            frames = self._software.decode(packet)
        elif self.name == CPU:
            frames = self._prove(packet)
        else:
            frames = self._decode(packet)
        self._fails = False
        self.skipper.see(frames)
        return frames

    def _open(self, kinds: Sequence[str]) -> None:
        for kind in kinds:
            reason = self._failures.reason(kind, self._codec)
            try:
                if reason is None:
                    self._hardware, self._kind = open_hardware(kind, self._software), kind
                    return
            except DecoderLost as error:
                reason = str(error)
                self._failures.add(kind, self._codec, reason)
            if self._kind != AUTO:
                self._say(f"cannot be decoded by {kind}: {reason}; the processor decodes it")

    def _skip(self, packet: Any) -> bool:
        """Let the decoder leave out what the skipper says; whether it gets the packet at all."""
        mode = self.skipper.choose(packet)
        for context in (self._software, self._hardware):
            if context is not None:
                context.skip_frame = "DEFAULT" if mode is Skip.NONE else mode.name
        if not self._fails and (self.skipper.leaves_out or (mode is Skip.NONKEY and not packet.is_keyframe)):
            self._skipped()
        return not self.skipper.leaves_out

    def _prove(self, packet: Any) -> list[av.VideoFrame]:
        """Decode on the processor, and beside it in hardware, from a key frame to the first frame of both."""
        frames = self._software.decode(packet)
        if not self._silent and not packet.is_keyframe:
            return frames
        self._silent += 1
        self._keep(packet)
        self._expected |= {frame.pts: self._digest(frame) for frame in frames if frame.pts is not None}
        try:
            self._early += self._hardware.decode(packet)
            seen = [frame for frame in self._early if frame.pts in self._expected]
            if not seen and self._silent > MAX_SILENT_PACKETS:
                raise DecoderLost("it gives no frame")
            if seen and any(self._digest(frame) != self._expected[frame.pts] for frame in seen):
                raise DecoderLost("its frames are not those of the processor")
        except Exception as error:  # a driver can fail in any way
            self._give_up(error)
            return frames
        if not seen:
            return frames
        self.name, self._silent = self._kind, 0
        self._last_pts = max(pts for pts in self._expected if pts is not None)
        frames += [frame for frame in self._early if self._is_new(frame)]
        self._expected, self._early = {}, []
        return frames

    def _decode(self, packet: Any) -> list[av.VideoFrame]:
        self._keep(packet)
        try:
            frames = self._hardware.decode(packet)
            is_expected = packet.size and self.skipper.mode is Skip.NONE
            self._silent = self._silent + 1 if is_expected and not frames else 0
            if self._silent > MAX_SILENT_PACKETS:
                raise DecoderLost("it gives no more frames")
        except Exception as error:  # a driver can fail in any way
            self._give_up(error)
            frames = self._replay()
        frames = [frame for frame in frames if self._is_new(frame)]
        if frames:
            self._last_pts = frames[-1].pts
        return frames

    def _is_new(self, frame: av.VideoFrame) -> bool:
        return frame.pts is None or self._last_pts is None or frame.pts > self._last_pts

    def _keep(self, packet: Any) -> None:
        if packet.is_keyframe:
            self._since_key, self._kept_bytes = [], 0
        self._kept_bytes += packet.size
        if self._kept_bytes <= MAX_KEPT_BYTES:
            self._since_key.append(packet)

    def _replay(self) -> list[av.VideoFrame]:
        """What the processor makes of the packets since the last key frame; nothing where they were too many."""
        packets = self._since_key if self._kept_bytes <= MAX_KEPT_BYTES else []
        self._since_key = []
        self._software.flush_buffers()
        return [frame for packet in packets for frame in self._software.decode(packet)]

    def _give_up(self, error: Exception) -> None:
        reason = str(error) if isinstance(error, DecoderLost) else reason_of(error)
        self._failures.add(self._kind, self._codec, reason)
        self._say(f"is not decoded by {self._kind} any more: {reason}; the processor goes on")
        self.name, self._hardware = CPU, None
        self._expected, self._early = {}, []

    def _say(self, text: str) -> None:
        self._note(text, "set `decode: cpu`, or see that this user may open the device")

    def _digest(self, frame: av.VideoFrame) -> int:
        return zlib.crc32(to_planar(frame, self._reformatter).to_ndarray().tobytes())
