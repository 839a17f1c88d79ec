"""The ledger adds up after any events, from any threads."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.queues import Ledger

EVENTS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["received", "processed", "late", "failed", "old"])))


@given(EVENTS)
def test_the_ledger_adds_up_after_any_events(events):
    ledger = Ledger("ab")
    pending = {"a": 0, "b": 0}
    for query, event in events:
        if event == "received":
            ledger.count_received(query)
            pending[query] += 1
        elif pending[query]:
            pending[query] -= 1
            if event == "failed":
                ledger.count_failed(query)
            elif event == "old":
                ledger.count_dropped(query, "old")
            else:
                ledger.count_processed(query, late=event == "late")
        assert ledger.balanced
    for account in ledger.to_json():
        settled = account["processed"] + account["failed"] + sum(account["dropped"].values())
        assert account["received"] == settled + account["pending"]
        assert account["pending"] == pending[account["query"]]


@pytest.mark.parametrize(
    "settle", [lambda b: b.count_processed("a"), lambda b: b.count_failed("a"), lambda b: b.count_dropped("a", "x")]
)
def test_a_frame_cannot_be_settled_twice(settle):
    ledger = Ledger("a")
    ledger.count_received("a")
    settle(ledger)
    with pytest.raises(RuntimeError, match="query a"):
        settle(ledger)
    assert ledger.balanced


def test_counts_of_several_threads_are_all_kept():
    ledger = Ledger("a")

    def work() -> None:
        for _ in range(500):
            ledger.count_received("a")
            ledger.count_processed("a")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.to_json()[0]["processed"] == 2000
    assert ledger.balanced
