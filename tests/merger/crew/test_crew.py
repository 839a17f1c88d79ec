"""What processes tell each other: results, errors, time; and what torchrun says of them."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from merger.distributed import PeerExit, ProcessGroup, check_consistent, process_group
from models.errors import GemelError, InputError
from tests.merger.crew.hands import Hands, together

TOLD = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "8"}, {**TOLD, "RANK": "0", "WORLD_SIZE": "1"}])
def test_without_torchrun_a_process_is_alone_and_has_every_query(environment: dict[str, str]) -> None:
    with process_group(environment) as crew:
        assert (crew.rank, crew.size) == (0, 1) and crew.mine(["a", "b"]) == ["a", "b"] and crew.has("a")
        assert crew.run_on_rank0(lambda: 3) == 3 and crew.all_gather_object(lambda: 4) == [4] and crew.first(5.0) == 5.0


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("-1", "2"), ("one", "2"), ("0", "99999")])
def test_numbers_that_torchrun_never_gives_are_refused(rank: str, size: str) -> None:
    with (
        pytest.raises(InputError, match=r"RANK: .* processes makes no sense"),
        process_group({**TOLD, "RANK": rank, "WORLD_SIZE": size}),
    ):
        pass


def test_more_processes_than_cards_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    two = {**TOLD, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    with (
        pytest.raises(
            InputError, match=r"starts more processes here than there are cards \(1\); lower --nproc-per-node"
        ),
        process_group(two),
    ):
        pass


def _told(crew: ProcessGroup) -> dict[str, object]:
    crew.place([["a"], ["b"]])
    own = crew.mine(["a", "b"])
    shown, real = crew.clock(), time.monotonic()
    with crew.local():
        alone = (crew.size, crew.mine(["a", "b"]), crew.clock() >= real)
    once, each = crew.run_on_rank0(lambda: crew.rank, by=1), crew.all_gather_object(lambda: crew.rank)
    return {"own": own, "once": once, "each": each, "clock": shown, "alone": alone}


def test_each_has_its_queries_and_all_know_the_same() -> None:
    first, second = together(2, _told)
    assert first.pop("own") == ["a"] and second.pop("own") == ["b"]
    assert first == second
    assert first["once"] == 1 and first["each"] == [0, 1] and first["alone"] == (1, ["a", "b"], True)


def _impatient() -> None:
    dist.distributed_c10d.default_pg_timeout = timedelta(seconds=1)


def _at_their_own_pace(crew: ProcessGroup) -> list[float]:
    """One is alone for longer than torch has others wait; then each comes late to what all do."""
    link, total = crew.link, torch.ones(3)
    crew.run_on_rank0(partial(time.sleep, 2.0))
    time.sleep(2.0 * crew.rank)
    link.meet((0, 1))
    time.sleep(2.0 - 2.0 * crew.rank)
    link.reduce(total, (0, 1)).wait()
    return total.tolist()


def test_others_wait_however_long_one_works_alone() -> None:
    assert Hands(2, _at_their_own_pace, first=_impatient).answers() == [[2.0, 2.0, 2.0]] * 2


def _other_files(crew: ProcessGroup) -> None:
    check_consistent(crew, {"workload": "same", "seed": crew.rank})


def test_an_error_is_told_by_the_first_process_and_ends_all() -> None:
    first, second = Hands(2, _other_files).answers()
    assert isinstance(first, GemelError) and "process 1 has another seed than the first" in str(first)
    assert isinstance(second, PeerExit) and second.code == 2
