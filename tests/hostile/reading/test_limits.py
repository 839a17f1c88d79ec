"""Numbers beyond all measure: refused by the limits that docs/guide.md tells, or borne, at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from models.errors import InputError, join_names
from models.io import MAX_CAMERAS, MAX_QUERIES
from models.workload import load_workload
from tests.hostile.harness import refused, tried

QUERY = "task: classification, classes: [x, y], model: cifar_resnet20, input_size: 32"
WORKLOAD = f"""
name: one
cameras: {{gate: {{source: gate.mp4, fps: 5}}}}
queries:
  - {{id: a, camera: gate, {QUERY}, KEY: VALUE}}
"""
KEYS = {
    "fps": ["1e6", "0", "-1", ".inf", ".nan", "1e-300", "1000.001", "x"],
    "sla_ms": ["1e-9", "0", "-1", ".inf", ".nan", "86400001", "[1]"],
    "priority": ["0", "-1", "1001", "1.5", ".inf", "1" + "0" * 90],
    "accuracy_target": ["0", "-1", "1.001", ".inf", ".nan"],
    "min_score": ["-0.1", "1.1", ".inf", ".nan"],
    "roi": ["[0, 0, 0, 0]", "[5, 5, 1, 1]", "[-1, 0, 1, 1]", "[0, 0, .inf, 1]", "[.nan, 0, 1, 1]", "[0, 0, 1e9, 1]"],
    "data": ["x" * 5000],
    "weights": ["x" * 5000],
}  # fmt: skip


@pytest.fixture
def workload(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        (tmp_path / "w.yaml").write_text(text)
        return tmp_path / "w.yaml"

    return write


def _many(queries: int, cameras: int = 1) -> str:
    first = f"  - &same {{id: q0, camera: c0, {QUERY}}}\n"
    others = "".join(f"  - {{<<: *same, id: q{index}}}\n" for index in range(1, queries))
    places = ", ".join(f"c{index}: {{source: gate.mp4, fps: 1}}" for index in range(cameras))
    return f"name: many\ncameras: {{{places}}}\nqueries:\n{first}{others}"


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in KEYS.items() for value in values])
def test_a_number_of_a_query_beyond_the_limits_is_one_line(
    workload: Callable[[str], Path], key: str, value: str
) -> None:
    path = workload(WORKLOAD.replace("KEY", key).replace("VALUE", value))
    with pytest.raises(InputError) as refusal:
        load_workload(path)
    said = str(refusal.value)
    assert said.startswith(f"{path}: queries[0].{key}") and len(said) < 500


@pytest.mark.parametrize("fps", ["1e6", "0", ".inf", ".nan", "1e-300"])
def test_a_rate_of_a_camera_beyond_the_limits_is_one_line(workload: Callable[[str], Path], fps: str) -> None:
    path = workload(WORKLOAD.replace(", KEY: VALUE", "").replace("fps: 5", f"fps: {fps}"))
    with pytest.raises(InputError, match=r"cameras\.gate\.fps"):
        load_workload(path)


@pytest.mark.parametrize("command", ["plan", "simulate", "inspect"])
def test_what_would_run_away_is_refused_at_once(workload: Callable[[str], Path], command: str) -> None:
    path = workload(WORKLOAD.replace("fps: 5", "fps: 1e6").replace("KEY: VALUE", "sla_ms: 1e-9"))
    refused([command, path.name], path.parent, path.name, "fps")


@pytest.mark.parametrize("seconds", ["1e300", "1e9", "1e6"])
def test_a_simulation_of_no_end_is_refused_at_once(workload: Callable[[str], Path], seconds: str) -> None:
    path = workload(WORKLOAD.replace(", KEY: VALUE", ""))
    refused(["simulate", path.name, "--duration", seconds], path.parent, "--duration", "at most 604800")


def test_a_simulation_of_many_days_is_refused_at_once(workload: Callable[[str], Path]) -> None:
    path = workload(WORKLOAD.replace(", KEY: VALUE", ""))
    refused(["simulate", path.name, "--duration", "600000"], path.parent, path.name, "frames that are played")


@pytest.mark.parametrize("seconds", ["inf", "nan", "-1", "0", "x", "1e-300"])
def test_seconds_that_are_none_are_refused_or_borne(workload: Callable[[str], Path], seconds: str) -> None:
    path = workload(WORKLOAD.replace(", KEY: VALUE", ""))
    seen = tried(["simulate", path.name, f"--duration={seconds}"], path.parent).held()
    assert seen.code == (0 if seconds == "1e-300" else 2)


def test_many_frames_a_second_of_many_queries_are_not_planned(workload: Callable[[str], Path]) -> None:
    path = workload(_many(10).replace("fps: 1", "fps: 1000"))
    refused(["plan", path.name], path.parent, path.name, "10000 frames a second in all")


@pytest.mark.parametrize(("queries", "cameras"), [(10_000, 1), (MAX_QUERIES + 1, 1), (1, MAX_CAMERAS + 1)])
@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_more_queries_or_cameras_than_there_can_be_are_told(
    workload: Callable[[str], Path], queries: int, cameras: int, command: str
) -> None:
    path = workload(_many(queries, cameras))
    refused([command, path.name], path.parent, path.name)


def test_as_many_queries_as_there_can_be_are_read_at_once_and_one_of_them_twice_is_told(
    workload: Callable[[str], Path],
) -> None:
    text = _many(MAX_QUERIES, MAX_CAMERAS)
    path = workload(text)
    seen = tried(["inspect", path.name, "--json"], path.parent).held()
    assert seen.code == 0
    refused(["inspect", workload(text.replace("id: q999}", "id: q1}")).name], path.parent, "'q1' occurs twice")
    unknown = workload(text.replace("camera: c0", "camera: x"))
    assert "c7 and 992 more" in refused(["inspect", unknown.name], path.parent, "no camera 'x'")


def test_names_are_listed_in_a_line_of_bearable_length() -> None:
    assert join_names(["a", "b"]) == "a, b" and join_names("abcdefghijk", 3) == "a, b, c and 8 more"
