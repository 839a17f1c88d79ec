"""What is believed of a file, by what it looks like and what hashing found."""

from __future__ import annotations

from edge_runtime.integrity.trust import STILL_S, Trust, found_bad, hashed, is_due, looked
from models.bundle.format import Stamp

AS_OPENED, CHANGED, AGAIN = Stamp(1, 100, 10), Stamp(1, 100, 20), Stamp(1, 100, 30)
SOUND = Trust(AS_OPENED, frozenset(), AS_OPENED)


def test_a_file_that_looks_as_it_did_is_trusted_and_any_other_is_not():
    assert looked(SOUND, AS_OPENED, 5.0) == SOUND and not SOUND.lacks("a")
    for other in (CHANGED, Stamp(1, 99, 10), Stamp(2, 100, 10)):
        doubted = looked(SOUND, other, 5.0)
        assert doubted.doubted and doubted.lacks("a")


def test_a_file_that_was_put_back_is_not_trusted_before_it_was_hashed():
    back = looked(looked(SOUND, CHANGED, 5.0), AS_OPENED, 6.0)
    assert back.doubted and hashed(back, AS_OPENED, AS_OPENED, ()).proven == AS_OPENED


def test_it_is_hashed_once_it_stands_still():
    doubted = looked(SOUND, CHANGED, 5.0)
    assert not is_due(doubted, 5.0) and is_due(doubted, 5.0 + STILL_S) and not is_due(SOUND, 99.0)
    assert not is_due(looked(doubted, AGAIN, 5.0 + STILL_S), 5.0 + STILL_S)


def test_what_was_hashed_while_the_file_changed_says_nothing():
    doubted = looked(SOUND, CHANGED, 5.0)
    assert hashed(doubted, CHANGED, AGAIN, ()) == doubted == hashed(doubted, AGAIN, AGAIN, ())
    assert hashed(doubted, AGAIN, CHANGED, ()) == doubted
    found = hashed(doubted, CHANGED, CHANGED, ["a"])
    assert found.lacks("a") and not found.lacks("b") and not found.doubted
    assert looked(found, CHANGED, 9.0) == found


def test_a_tensor_that_changes_by_itself_is_not_loaded():
    assert found_bad(SOUND, AS_OPENED, "a").lacks("a")
    assert found_bad(SOUND, CHANGED, "a") == SOUND, "it was read of another state"
