"""Price files, budgets and deadlines: what is read, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemel.merger.prices import CURRENCIES, MergeTrial, Spending, load_prices, read_trials, record_trial
from gemel.models.errors import InputError

PRICES = (
    "currency: USD\nkinds:\n  here: {price: 0.5}\n  fast-spot: {price: 1, spot: true, interruptions: 0.2, count: 4}\n"
)


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    path = tmp_path / "prices.yaml"
    path.write_text(PRICES)
    return path


def test_load_prices_gives_the_kinds_by_name(prices: Path) -> None:
    found = load_prices(prices)
    assert found.currency == "usd" and {name: kind.name for name, kind in found.kinds.items()} == {
        "here": "here", "fast-spot": "fast-spot",
    }  # fmt: skip
    assert found.kind(None).price == 0.5 and found.kind("fast-spot").interruptions == 0.2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("0.5", "0"), r"kinds\.here\.price: input should be greater than 0 \(given: 0\)"),
        (("0.5", "-2"), r"kinds\.here\.price: input should be greater than 0 \(given: -2\)"),
        (("0.5", ".nan"), r"kinds\.here\.price"),
        (("0.5", ".inf"), r"kinds\.here\.price"),
        (("0.2", "1"), r"kinds\.fast-spot\.interruptions: input should be less than 1"),
        (("spot: true", "spot: false"), r"interruptions: only a machine with `spot: true` is taken back"),
        (("count: 4", "count: 0"), r"count: input should be greater than or equal to 1"),
        (("USD", "gold"), r"currency: unknown currency: give its code, as usd, eur or gbp \(given: 'gold'\)"),
        (("price: 0.5", "prize: 0.5"), r"unknown key; did you mean price\?"),
        ((PRICES, "currency: usd\nkinds: {}\n"), r"kinds: is empty"),
        ((PRICES, "currency: usd\n"), r"kinds: this key is missing"),
        ((PRICES, "[]"), r"is not a mapping"),
    ],
)
def test_load_prices_of_a_bad_file_is_refused_in_one_line(prices: Path, change: tuple[str, str], message: str) -> None:
    prices.write_text(PRICES.replace(*change))
    with pytest.raises(InputError, match=message) as refusal:
        load_prices(prices)
    assert str(prices) in str(refusal.value) and "\n" not in str(refusal.value)


def test_parse_reads_money_and_time(prices: Path) -> None:
    found = Spending.parse(prices, "fast-spot", "2.5USD", "1.5h")
    assert found is not None and (found.budget, found.deadline_s, found.kind.price) == (2.5, 5400.0, 1.0)
    assert Spending.parse() is None
    alone = Spending.parse(deadline="90 min")
    assert alone is not None and (alone.deadline_s, alone.kind.price, alone.currency) == (5400.0, 0.0, "")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"machine": "slow"}, "no kind 'slow'; use one of: here, fast-spot"),
        ({"budget": "5eur"}, "--budget: is in eur, and the prices are in usd"),
        ({"budget": "5 gold"}, "--budget: '5 gold' is not an amount above 0 with a unit; write it as 5usd"),
        ({"budget": "0usd"}, "--budget: '0usd' is not an amount above 0"),
        ({"budget": "-3usd"}, "--budget: '-3usd' is not an amount above 0"),
        ({"deadline": "2"}, "--deadline: '2' is not an amount above 0 with a unit; write it as 90min"),
        ({"deadline": "0h"}, "--deadline: '0h' is not an amount above 0"),
    ],
)
def test_parse_of_bad_options_is_refused_in_one_line(prices: Path, given: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as refusal:
        Spending.parse(prices, **given)
    assert message in str(refusal.value)


@pytest.mark.parametrize(("given", "option"), [({"budget": "5usd"}, "--budget"), ({"machine": "here"}, "--machine")])
def test_parse_without_prices_asks_for_them(given: dict[str, str], option: str) -> None:
    with pytest.raises(InputError, match=f"{option}: there are no prices; give --prices FILE"):
        Spending.parse(**given)


def test_record_trial_is_read_for_its_merge_alone(prices: Path) -> None:
    known = load_prices(prices)
    rows = [("here", "a", 2.0), ("here", "b", 3.0), ("gone", "a", 4.0), ("fast-spot", "a", 8.0)]
    for kind, merge, rate in rows:
        record_trial(known, MergeTrial(kind=kind, merge=merge, rate=rate))
    assert [(trial.kind, trial.rate) for trial in read_trials(known, "a")] == [("here", 2.0), ("fast-spot", 8.0)]


def test_read_trials_of_a_malformed_line_names_it(prices: Path) -> None:
    trials = prices.with_name("prices.yaml.trials.jsonl")
    trials.write_text('{"kind": "here", "merge": "a", "rate": 0.0}\n')
    with pytest.raises(InputError, match=r"trials\.jsonl: line 1: rate: .*; remove the line"):
        read_trials(load_prices(prices), "a")


def test_record_trial_in_a_folder_that_is_gone_is_a_note(prices: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = load_prices(prices).model_copy(update={"path": prices.parent / "gone" / "prices.yaml"})
    record_trial(known, MergeTrial(kind="here", merge="a", rate=1.0))
    assert "this trial is not known to later merges" in caplog.text


def test_currencies_are_codes_of_three_letters() -> None:
    assert len(CURRENCIES) > 140 and all(len(code) == 3 for code in CURRENCIES) and {"usd", "eur", "jpy"} <= CURRENCIES
