"""The alert rules ask for metrics that a box exports, and fire as Prometheus evaluates them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from gemel.edge_runtime.http.metrics import Metrics
from gemel.edge_runtime.http.status import TlsStatus, UpdateStatus
from tests.edge_runtime.http.box import Box

ALERTS = Path(__file__).resolve().parents[2] / "docs" / "alerts.yaml"
CASES = {
    "gemel_overloaded": ("1x20", "10m", "GemelOverloaded", {}),
    'gemel_camera_up{camera="gate"}': ("0x20", "6m", "GemelCameraAway", {"camera": "gate"}),
    'gemel_sink_undelivered_total{sink="webhook",reason="unauthorized"}': (
        "0x5 3x15", "10m", "GemelResultsLost", {"sink": "webhook", "reason": "unauthorized"}
    ),
    'gemel_reloads_total{outcome="refused"}': ("0x5 1x15", "10m", "GemelReloadRefused", {"outcome": "refused"}),
    "gemel_tls_expiry_timestamp_seconds": ("1000000x20", "10m", "GemelCertificateRunsOut", {}),
    'gemel_sink_up{sink="mqtt"}': ("0x20", "6m", "GemelSinkDown", {"sink": "mqtt"}),
    "gemel_update_trouble": ("1x80", "70m", "GemelUpdateTrouble", {}),
    "gemel_update_checked_timestamp_seconds": ("0x3000", "2890m", "GemelUpdatesUnchecked", {}),
    "gemel_bundle_valid_until_timestamp_seconds": ("2000000x3000 1000x9", "3005m", "GemelBundleRunsOut", {}),
}  # fmt: skip


def test_alerts_ask_for_exported_metrics() -> None:
    updates = UpdateStatus(
        checked_at=1.79e9, trial=None, refused={}, trouble="it stalls", sequence=7, valid_until=1.8e9
    )
    box = Box(tls=TlsStatus(expires_at=1.79e9, warning=None), updates=updates)
    there = set(re.findall(r"^(gemel_\w+)", Metrics(["gate"]).to_text(box.status).decode(), re.MULTILINE))
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    asked = {name for rule in rules for name in re.findall(r"gemel_\w+", rule["expr"])}
    assert len(rules) == len({rule["alert"] for rule in rules}) and asked <= there


def test_alerts_fire_in_prometheus(tmp_path: Path) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed")
    checked = subprocess.run([program, "check", "rules", ALERTS], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    tests = []
    for series, (values, at, alert, labels) in CASES.items():
        name, brace, rest = series.partition("{")
        given = f'{name}{{instance="box"{"," + rest if brace else "}"}'
        expected = {"exp_labels": {"instance": "box", "severity": "warning", **labels}}
        tests.append({
            "interval": "1m", "input_series": [{"series": given, "values": values}],
            "alert_rule_test": [
                {"eval_time": at, "alertname": alert, "exp_alerts": [expected]},
                {"eval_time": "1m", "alertname": alert, "exp_alerts": [expected] if "tls" in series else []},
            ],
        })  # fmt: skip
    path = tmp_path / "tests.yaml"
    for test in tests:
        for row in test["alert_rule_test"]:
            rule = next(
                one
                for one in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
                if one["alert"] == row["alertname"]
            )
            for alert in row["exp_alerts"]:
                text = re.sub(
                    r"\{\{ \$labels\.(\w+) \}\}", lambda found, alert=alert: alert["exp_labels"][found[1]],
                    rule["annotations"]["summary"],
                )  # fmt: skip
                alert["exp_annotations"] = {"summary": text}
    path.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}))
    tested = subprocess.run([program, "test", "rules", path], capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout + tested.stderr
