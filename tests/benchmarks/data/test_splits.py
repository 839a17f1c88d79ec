"""The rules that cut real footage: nothing may stand in two splits, and neighbours may not be torn apart at random."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.data import junction as prepare_junction
from benchmarks.data import splits


def test_number_in_orders_by_number_not_by_letters():
    names = ["GTI/image100.png", "GTI/image12.png", "GTI/image0007.png"]
    assert sorted(names, key=splits.number_in) == ["GTI/image0007.png", "GTI/image12.png", "GTI/image100.png"]


def test_number_in_refuses_a_name_without_number():
    with pytest.raises(ValueError, match=r"readme\.png"):
        splits.number_in("readme.png")


@given(st.integers(0, 300), st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_contiguous_keeps_every_item_once_and_in_order(count, shares):
    parts = splits.contiguous(range(count), shares)
    assert [item for part in parts for item in part] == list(range(count))
    assert len(parts) == len(shares)
    for part, share in zip(parts, shares):
        assert abs(len(part) - count * share / sum(shares)) <= 1


@given(st.integers(0, 300), st.integers(0, 6))
def test_in_time_leaves_the_gap_between_neighbours(count, gap):
    cut = splits.in_time(range(count), gap)
    assert list(cut) == ["train", "val", "test"]
    for before, after in (("train", "val"), ("val", "test")):
        if cut[before] and cut[after]:
            assert cut[after][0] - cut[before][-1] > gap


def test_in_time_is_60_20_20():
    cut = splits.in_time(range(100))
    assert {split: len(part) for split, part in cut.items()} == {"train": 60, "val": 20, "test": 20}


def test_in_segments_tests_every_part_of_the_list():
    segments = splits.in_segments(list(range(400)), 8)
    assert len(segments) == 8
    for number, segment in enumerate(segments):
        assert segment["train"][0] == 50 * number and segment["test"][-1] == 50 * number + 49


def test_by_day_puts_no_day_into_two_splits():
    clips = ["625_201709140917", "625_201709141107", "625_201708101101", "625_201708311636"]
    days = {"20170914": "train", "20170810": "test", "20170831": "val"}
    dealt = splits.by_day(clips, days)
    assert dealt == {
        "train": ["625_201709140917", "625_201709141107"], "val": ["625_201708311636"], "test": ["625_201708101101"],
    }  # fmt: skip


def test_by_day_refuses_a_day_nobody_assigned():
    with pytest.raises(ValueError, match="20180101"):
        splits.by_day(["625_201801010000"], {"20170914": "train"})


def test_the_junction_days_use_every_split():
    assert set(prepare_junction.A13_DAYS.values()) == set(splits.SPLITS)
    assert prepare_junction.A13_DAYS[prepare_junction.A13_PLAYED.split("_")[1][:8]] == "test"


@given(st.integers(4, 40), st.integers(4, 40), st.randoms())
def test_by_track_has_every_class_in_every_split_and_tests_two_of_six(cars, trucks, random):
    tracks = {number: "car" if number < cars else "truck" for number in range(cars + trucks)}
    dealt = splits.by_track(tracks, {number: random.random() for number in tracks})
    assert set(dealt) == set(tracks)
    for name, count in (("car", cars), ("truck", trucks)):
        held = [dealt[track] for track in tracks if tracks[track] == name]
        assert set(held) == set(splits.SPLITS)
        assert held.count("train") >= held.count("test") >= (2 if count >= 6 else 1)


def test_by_track_spreads_large_and_small_tracks():
    tracks = dict.fromkeys(range(16), "car")
    dealt = splits.by_track(tracks, {track: float(track) for track in tracks})
    tested = [track for track in tracks if dealt[track] == "test"]
    assert min(tested) < 4 and max(tested) >= 12


def test_by_track_refuses_a_class_too_small_to_split():
    with pytest.raises(ValueError, match="class bus has 3 tracks"):
        splits.by_track({1: "bus", 2: "bus", 3: "bus"}, {1: 1, 2: 1, 3: 1})


@given(st.integers(0, 200), st.integers(1, 60))
def test_thin_is_at_most_that_many_and_in_order(count, most):
    kept = splits.thin(range(count), most)
    assert len(kept) == min(count, most)
    assert kept == sorted(set(kept))


def test_with_margin_stays_inside_the_frame():
    assert splits.with_margin((10, 10, 30, 50), 0.1, 352, 288) == (8, 6, 32, 54)
    assert splits.with_margin((0, 0, 352, 288), 0.5, 352, 288) == (0, 0, 352, 288)


def test_covered_counts_only_nearer_boxes():
    far, near = (0.0, 0.0, 10.0, 10.0), (0.0, 5.0, 10.0, 20.0)
    assert splits.overlap_fraction(far, [near]) == pytest.approx(0.5)
    assert splits.overlap_fraction(near, [far]) == 0.0
