"""Which frames are not decoded: as many as the asked rate allows, from what the stream shows of itself."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import pytest

from gemel.edge_runtime.capture.skipping import FrameSkipper, Skip, choose_skip

FPS = 25
IBBP, IPPP = "IBBP", "IPPP"


@pytest.mark.parametrize(
    "needed_fps, key_gap_s, reference_gap_s, expected",
    [
        (None, 0.1, 0.1, Skip.NONE), (0.0, None, None, Skip.NONKEY), (1.0, 2.0, None, Skip.NONE),
        (0.4, 2.0, 0.12, Skip.NONKEY), (0.5, 2.0, 0.12, Skip.NONREF), (7.0, 2.0, 0.12, Skip.NONREF),
        (8.0, 2.0, 0.12, Skip.NONE), (5.0, None, None, Skip.NONE),
    ],
)  # fmt: skip
def test_skip_leaves_the_asked_rate(needed_fps, key_gap_s, reference_gap_s, expected):
    assert choose_skip(needed_fps, key_gap_s, reference_gap_s) is expected


class Stream:
    """Packets and frames of a camera, a key frame every `gop`, whose kinds repeat `kinds`."""

    def __init__(self, kinds: str, gop: int, needed_fps: float | None, fixed: Skip | None = None) -> None:
        self.kinds, self.gop, self.needed_fps, self.number = kinds, gop, needed_fps, 0
        self.skipper = FrameSkipper(fixed, lambda: self.needed_fps)
        self.decoded: list[int] = []

    def play(self, count: int, drops_all: bool = False) -> Skip:
        """So many packets more; the last mode."""
        for number in range(self.number, self.number + count):
            is_key = number % self.gop == 0
            kind = "I" if is_key else self.kinds[number % len(self.kinds)]
            mode = self.skipper.choose(
                SimpleNamespace(is_keyframe=is_key, dts=number, pts=number, time_base=Fraction(1, FPS))
            )
            is_left_out = (mode is Skip.NONREF and kind == "B") or (mode is Skip.NONKEY and not is_key)
            if not is_left_out and not self.skipper.leaves_out and not (drops_all and mode is Skip.NONREF):
                frame = SimpleNamespace(time=number / FPS, pict_type=" IPB".index(kind))
                self.skipper.see([frame])
                self.decoded.append(number)
        self.number += count
        return self.skipper.mode


def test_frames_that_none_builds_on_are_skipped_where_others_come_often_enough():
    stream = Stream(IBBP, 100, 5.0)
    assert stream.play(20) is Skip.NONE, "nothing is known yet"
    assert stream.play(80) is Skip.NONREF
    gaps = [after - before for before, after in zip(stream.decoded, stream.decoded[1:], strict=False)]
    assert max(gaps) <= FPS / 5 and len(stream.decoded) <= 60
    assert Stream(IBBP, 100, 20.0).play(200) is Skip.NONE and Stream(IBBP, 100, None).play(200) is Skip.NONE
    assert Stream(IPPP, 100, 5.0).play(200) is Skip.NONE, "each builds on the one before"


def test_frames_between_key_frames_are_skipped_where_few_are_asked_for():
    stream = Stream(IPPP, 25, 0.8)
    assert stream.play(26) is Skip.NONKEY, "two key frames show how often they come"
    stream.needed_fps = 5.0
    assert stream.play(24) is Skip.NONKEY, "what comes now builds on what was left out"
    assert stream.play(1) is Skip.NONE and stream.decoded[-1] == 50


def test_skipping_ends_where_fewer_frames_come_than_foreseen():
    stream = Stream(IBBP, 1000, 5.0)
    assert stream.play(60) is Skip.NONREF
    assert stream.play(5, drops_all=True) is Skip.NONREF
    assert stream.play(10, drops_all=True) is Skip.NONE and stream.play(200) is Skip.NONE, "for good"


@pytest.mark.parametrize("gop, needed_fps, step", [(1, 5.0, 4), (10, 1.0, 20)])
def test_key_frames_are_skipped_too_where_the_next_comes_soon_enough(gop, needed_fps, step):
    stream = Stream(IPPP, gop, needed_fps)
    stream.play(200)
    steps = [after - before for before, after in zip(stream.decoded, stream.decoded[1:], strict=False)]
    assert set(steps[-5:]) == {step} and step <= 0.9 * FPS / needed_fps
    stream.needed_fps = None
    stream.play(20)
    assert stream.decoded[-gop:] == list(range(220 - gop, 220)), "from the next key frame on"


def test_query_that_is_switched_off_costs_key_frames_alone():
    stream = Stream(IPPP, 50, 0.0)
    assert stream.play(120) is Skip.NONKEY and stream.decoded == [0, 50, 100]


def test_fixed_skip_asks_nobody():
    assert Stream(IPPP, 50, None, Skip.NONKEY).play(120) is Skip.NONKEY
    assert Stream(IBBP, 50, 0.1, Skip.NONE).play(120) is Skip.NONE
