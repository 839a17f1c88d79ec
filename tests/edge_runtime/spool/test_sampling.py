"""When an answer is sampled and what makes way, without a clock or a disk."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.samples import RETRY_S, SampleDecision, SamplingState, count_evictions, decide_sample

TIMES = st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 50)), max_size=80)


@given(TIMES, st.floats(0.01, 20))
def test_each_query_has_its_first_answer_sampled_and_then_one_every_so_often(answers, every_s):
    state, taken = SamplingState(every_s), {"a": [], "b": []}
    seen = dict.fromkeys("ab", -1.0)
    for query, now in sorted(answers, key=lambda one: one[1]):
        state, choice = decide_sample(state, query, True, now)
        due = not taken[query] or now >= taken[query][-1] + every_s
        assert choice is (SampleDecision.TAKE if due else SampleDecision.PASS)
        taken[query] += [now] if due else []
        seen[query] = now
    assert all(bool(taken[query]) == (seen[query] >= 0) for query in "ab")


def test_without_room_a_sample_stays_due_and_is_tried_again_soon():
    state, choice = decide_sample(SamplingState(60.0), "a", False, 100.0)
    assert choice is SampleDecision.NO_ROOM
    state, choice = decide_sample(state, "a", True, 100.0 + RETRY_S / 2)
    assert choice is SampleDecision.PASS  # so that what is counted is samples, not frames
    state, choice = decide_sample(state, "a", True, 100.0 + RETRY_S)
    assert choice is SampleDecision.TAKE
    assert decide_sample(state, "a", True, 100.0 + RETRY_S + 59.9)[1] is SampleDecision.PASS


@given(st.lists(st.integers(0, 100), max_size=20), st.integers(0, 100), st.integers(0, 300))
def test_as_few_as_possible_of_the_oldest_make_way(sizes, coming, most):
    gone = count_evictions(sizes, coming, most)
    if gone is None:
        assert coming > most
        return
    assert sum(sizes[gone:]) + coming <= most
    assert gone == 0 or sum(sizes[gone - 1 :]) + coming > most
