"""What a merge says that it takes, what it took, and where it refuses to begin."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gemel.merger import merge
from gemel.merger.checkpoint import Checkpoint
from gemel.merger.context import MergeContext
from gemel.merger.cost_meter import CostMeter
from gemel.merger.distributed import ProcessGroup
from gemel.merger.forecast import FORECAST, Forecast
from gemel.merger.prices import Spending, load_prices, read_trials
from gemel.models.errors import InputError
from gemel.models.workload import Workload
from tests.merger.options import QUICK

PRICES = """
currency: usd
kinds:
  here: {price: 360}
  spot: {price: 36, spot: true, interruptions: 0.1, speed: 1}
  fast: {price: 3600, speed: 1000}
  unknown: {price: 1}
"""
"""A second here costs 0.1 usd."""


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    path = tmp_path / "prices.yaml"
    path.write_text(PRICES)
    return path


def log_rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"{out}.log.jsonl").read_text().splitlines()]


def test_merge_with_prices_tells_what_it_takes_and_took(workload: Workload, tmp_path: Path, prices: Path) -> None:
    events = list[tuple[str, dict[str, Any]]]()
    plain, out = tmp_path / "plain.safetensors", tmp_path / "b.safetensors"
    before = merge(workload, plain, options=QUICK)
    spending = Spending.parse(prices, None, "1000usd", "2h")
    report = merge(
        workload, out, options=replace(QUICK, spending=spending), progress=lambda event, **f: events.append((event, f))
    )
    assert out.read_bytes() == plain.read_bytes() and report.flops == before.flops and before.cost is None
    cost = report.cost
    assert (
        cost is not None
        and cost.money is not None
        and cost.money == pytest.approx(0.1 * cost.seconds)
        and cost.currency == "usd"
    )
    saved = report.bytes_before - report.bytes_after
    assert cost.money_per_gib == pytest.approx(cost.money / (saved / 2**30)) and cost.flops == report.flops
    first = next(fields for event, fields in events if event == "forecast")
    assert first["first"] and (cost.told_seconds, cost.told_money) == (first["seconds"], first["money"])
    assert "usd, " in first["text"] and " on here; " in first["text"] and " on spot" in first["text"]
    assert log_rows(out)[:-1] == log_rows(plain) and log_rows(out)[-1] == {"cost": report.to_json()["cost"]}
    assert any("no throughput is known of unknown" in note for note in report.notes)
    known = load_prices(prices)
    digest = json.loads(prices.with_name("prices.yaml.trials.jsonl").read_text().splitlines()[-1])["merge"]
    trial, whole = read_trials(known, digest)
    assert trial.rate == whole.rate > 0 and (trial.flops, whole.flops) == (0.0, report.flops)
    assert 0 < whole.seconds <= cost.seconds + 5


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"deadline": "1s"}, "--deadline: nothing reaches it: about .* on here; the best is .* on fast: give so much"),
        ({"budget": "0.01usd"}, "--budget: nothing reaches it: about .* on here; the best is .* on spot: give so much"),
    ],
)
def test_merge_beyond_its_limits_says_what_would_do_and_writes_nothing(
    workload: Workload, tmp_path: Path, prices: Path, limits: dict[str, str], message: str
) -> None:
    out = tmp_path / "b.safetensors"
    with pytest.raises(InputError, match=message):
        merge(workload, out, options=replace(QUICK, spending=Spending.parse(prices, **limits)))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("b.")] == []


def test_merge_with_a_deadline_alone_has_no_money(workload: Workload, tmp_path: Path) -> None:
    spending = Spending.parse(deadline="1h")
    report = merge(workload, tmp_path / "b.safetensors", options=replace(QUICK, spending=spending))
    assert report.cost is not None and report.cost.money is None and report.cost.told_seconds


def open_meter(tmp_path: Path, spending: Spending | None, resume: bool = False) -> tuple[CostMeter, Checkpoint]:
    assert spending is not None
    checkpoint = Checkpoint(tmp_path / "out.work", {}, resume)
    return CostMeter(spending, checkpoint, ProcessGroup()), checkpoint


def test_cost_meter_adds_the_starts_on_different_kinds(tmp_path: Path, prices: Path) -> None:
    meter, checkpoint = open_meter(tmp_path, Spending.parse(prices, "here", "5usd"))
    assert meter.money(10.0) == pytest.approx(1.0) and meter.max_seconds == pytest.approx(50.0)
    checkpoint.seconds = 20.0  # of work before the end of this start
    checkpoint.save()
    later, checkpoint = open_meter(tmp_path, Spending.parse(prices, "spot", "5usd"), resume=True)
    assert checkpoint.seconds == pytest.approx(20.0, abs=5)
    begun = checkpoint.seconds
    assert later.money(begun + 10) == pytest.approx(0.1 * begun + 0.1)
    assert later.max_seconds == pytest.approx(begun + (5 - 0.1 * begun) / 0.01)


def test_cost_meter_deadline_counts_from_the_first_start(
    tmp_path: Path, prices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, checkpoint = open_meter(tmp_path, Spending.parse(prices, deadline="2h"))
    checkpoint.save()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)  # an hour without any machine
    later, _ = open_meter(tmp_path, Spending.parse(prices, deadline="2h"), resume=True)
    assert later.deadline_left_s == pytest.approx(3600, abs=10)
    assert later.limit(QUICK).max_minutes == pytest.approx(60, abs=1)


def test_forecast_that_drifts_is_told_again_with_what_would_do(
    ctx: MergeContext, tmp_path: Path, prices: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    events = list[dict[str, Any]]()
    ctx.progress = lambda event, **fields: events.append(fields)
    meter, _ = open_meter(tmp_path, Spending.parse(prices, deadline="10min"))
    ctx.speed = 1e9
    forecast = Forecast(ctx, meter, "digest")
    forecast.expect(lambda: 100e9 / FORECAST.used_fraction)
    forecast.expect(None)
    assert len(events) == 1 and events[0]["seconds"] == pytest.approx(100, abs=5) and events[0]["first"]
    ctx.flops.total += 10e9  # in 100 s: a tenth of the rate of the trial
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + 100)
    forecast.expect(None)
    assert len(events) == 2 and events[1]["seconds"] == pytest.approx(1000, abs=20) and not events[1]["first"]
    assert " on fast" in events[1]["text"]
    assert "--deadline: this machine does not reach it: about" in caplog.text
    assert "go on with --resume: merge with" in caplog.text and "on fast" in caplog.text
