"""Damaged files of every kind for FUZZ_MINUTES in all, as `make fuzz` runs it.

A failure leaves the file and its command in a folder of its kind below `out/fuzz`. FUZZ_SEED repeats a run.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from random import Random

import pytest

from tests.hostile.kinds import KINDS, DamageRunner, draw_case

MINUTES = float(os.environ.get("FUZZ_MINUTES", "10"))
SECONDS_PER_KIND = 60 * MINUTES * (os.cpu_count() or 1) / len(KINDS)
OUT = Path(os.environ.get("FUZZ_OUT", "out/fuzz"))


@pytest.mark.timeout(SECONDS_PER_KIND + 120)
@pytest.mark.parametrize("name", KINDS)
def test_damaged_file_is_refused_or_harmless_for_minutes(whole_house: Path, tmp_path: Path, name: str) -> None:
    seed = os.environ.get("FUZZ_SEED") or os.urandom(4).hex()
    random, runner = Random(f"{seed} {name}"), DamageRunner(whole_house, tmp_path / "house")
    folder, count, end = OUT / name.replace(" ", "-"), 0, time.monotonic() + SECONDS_PER_KIND
    folder.mkdir(parents=True, exist_ok=True)
    while time.monotonic() < end:
        case = draw_case(name, whole_house, random)
        count += 1
        (folder / Path(KINDS[name].file).name).write_bytes(case.data)
        (folder / "command.txt").write_text(f"gemel {' '.join(map(str, case.command))}\nseed {seed}, case {count}\n")
        runner.evaluate(case)
    shutil.rmtree(folder)
