"""Every fault of the table, a few times, on a real `gemel run`; `make faults` plays them in full."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.faults import measure, soak
from tests.faults.catalogue import SCENARIOS
from tests.faults.scenario import Found, Missing, Scenario, Tell


@pytest.mark.exhaustive
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.name)
def test_a_box_withstands(scenario: Scenario, tmp_path: Path) -> None:
    try:
        found = scenario.run(tmp_path, scenario.few, print)
    except Missing as why:
        pytest.skip(str(why))
    print(found.said, found.slow)
    assert not found.broken


def test_what_was_recorded_is_not_played_again_and_what_did_not_hold_is_told(tmp_path, monkeypatch, capsys) -> None:
    played: list[tuple[str, int]] = []

    def scenario(name: str, broken: str | None = None, missing: bool = False) -> Scenario:
        def run(folder: Path, times: int, tell: Tell) -> Found:
            played.append((name, times))
            if missing:
                raise Missing("there is no such disk")
            assert broken != "raised", "the box ended"
            return Found("so it was", {}, [broken] if broken else [])

        return Scenario(name, "a fault", "to hold", "times", 100, 1, run)

    monkeypatch.setattr(measure, "bare_s", lambda: 4.0)
    monkeypatch.setattr(measure, "SCENARIOS", (scenario("a"), scenario("b", missing=True)))
    out = ["--out", str(tmp_path)]
    assert measure.main(out) == 0 and measure.main(out) == 0
    assert (
        played == [("a", 100), ("b", 100), ("b", 100)]
        and "b: left out: there is no such disk" in capsys.readouterr().out
    )
    assert measure.main([*out, "--again", "--times", "7"]) == 0 and played[-2:] == [("a", 7), ("b", 7)]
    assert json.loads((tmp_path / "a.json").read_text())["times"] == 7
    monkeypatch.setattr(measure, "SCENARIOS", (scenario("c", "it fell"), scenario("d", "raised")))
    assert measure.main(out) == 1
    told = capsys.readouterr().out
    assert "DID NOT HOLD: it fell" in told and "DID NOT HOLD: the box ended" in told


@pytest.mark.exhaustive
def test_a_soak_samples_what_a_box_holds(tmp_path: Path) -> None:
    row = soak.soak(tmp_path, 0.1, soak.write_tiny_box(tmp_path), 0.5)
    assert row["adds_up"] and row["exit_code"] == 0 and row["processed"] > 0
    assert len(row["samples"]) > 3 and all(one[1] > 1e7 for one in row["samples"])


def test_a_slope_is_that_after_the_warm_up() -> None:
    samples = [
        [float(second), 1e8 + (50 * second if second < 600 else 30_000 + 100 * second)] for second in range(3600)
    ]
    assert soak.slope(samples, 600.0) == 360_000


def test_the_error_of_a_slope_covers_what_noise_makes_of_it() -> None:
    draw = np.random.default_rng(0)
    off = []
    for _ in range(200):
        noise = np.repeat(draw.normal(0, 1e6, 60), 10)  # samples that lie near each other are alike
        samples = [[6.0 * place, 1e8 + value] for place, value in enumerate(noise)]
        error = soak.slope_error(samples, 600.0)
        assert error is not None
        off.append(abs(soak.slope(samples, 600.0)) / error)
    assert 0.5 < np.mean(np.array(off) < 1) < 0.8 and soak.slope_error(samples[:20], 0.0) is not None
    assert soak.slope_error(samples[:10], 0.0) is None
