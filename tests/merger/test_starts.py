"""A start of several processes: a name of its own, and heartbeats that find one that hangs."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemel.merger.heartbeat import LAST, Heartbeat, HeartbeatConfig, PeerWatch
from gemel.merger.rendezvous import agree_on_start


class DictStore(dict[str, bytes]):
    """A store within the process."""

    def set(self, key: str, value: str) -> None:
        """As torch.distributed.Store."""
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return all(key in self for key in keys)


class LostStore(DictStore):
    """A store that does not answer."""

    def set(self, key: str, value: str) -> None:
        """Fail as TCPStore does."""
        raise RuntimeError("Connection reset by peer")


@given(st.lists(st.tuples(st.floats(0, 30), st.booleans()), max_size=20))
def test_rank_is_silent_once_its_count_stands_still(steps: list[tuple[float, bool]]) -> None:
    watch, now, counted, last = PeerWatch({1: 0.0}, 45.0), 0.0, 0, 0.0
    for seconds, beats in steps:
        now += seconds
        if beats:
            counted, last = counted + 1, now
        if counted:
            watch.see(1, str(counted), now)
        assert bool(watch.problem(now)) == (now - last > 45.0)
    watch.see(1, LAST, now)
    assert watch.problem(now + 1e6) == ""


@pytest.mark.parametrize(
    ("store", "problem"),
    [(DictStore(), "process 1 has been silent for"), (LostStore(), "the machine that keeps the group together")],
)
def test_heartbeat_ends_a_process_whose_peer_is_silent(store: DictStore, problem: str) -> None:
    ended, problems = threading.Event(), list[str]()

    def end(text: str) -> None:
        problems.append(text)
        ended.set()

    Heartbeat(store, 0, 2, end, HeartbeatConfig(interval_s=0.01, timeout_s=0.05))
    assert ended.wait(10) and problems[0].startswith(problem)


def test_heartbeat_of_a_rank_that_is_done_ends_nobody() -> None:
    store, problems = DictStore(), list[str]()
    config = HeartbeatConfig(interval_s=0.01, timeout_s=0.1)
    first, second = (Heartbeat(store, rank, 2, problems.append, config) for rank in range(2))
    second.stop(done=True)
    first._thread.join(0.3)
    first.stop(done=True)
    assert problems == [] and store["heartbeat/0"] == store["heartbeat/1"] == LAST.encode()


@given(st.integers(1, 4), st.lists(st.integers(0, 3)), st.lists(st.floats(0, 0.05), min_size=4, max_size=4))
@settings(max_examples=15, deadline=None)
def test_ranks_agree_on_a_start_whatever_earlier_ones_left(size: int, earlier: list[int], delays: list[float]) -> None:
    store, names = DictStore(), list[str]()
    for rank in earlier:
        store.set(f"hello/{rank}", f"old-{rank}")
    store.set("start", " ".join(f"old-{rank}" for rank in range(size)))
    store.set(f"begun/{store['start'].decode()}", "1")

    def join(rank: int) -> None:
        time.sleep(delays[rank])
        names.append(agree_on_start(store, rank, size, 30.0))

    ranks = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert len(names) == size and len(set(names)) == 1 and "old" not in names[0]


def test_start_without_all_ranks_fails_in_time() -> None:
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    with pytest.raises(TimeoutError, match="not all 2 processes came within 3 s"):
        agree_on_start(DictStore(), 0, 2, 3.0, lambda: now[0], wait)
