"""Commands in odd surroundings: locales, closed outputs, folders that are gone, limits, signals."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.harness import REPOSITORY, TRACEBACK, tried_apart
from tests.hostile.samples import BUNDLE

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def shell(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What becomes of a line of the shell, in which $GEMEL is the command."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GEMEL": f"{sys.executable} -m gemel"}
    return subprocess.run(
        ["bash", "-c", text], cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("name", ["bé.safetensors", "b\udcff.safetensors"])
@pytest.mark.parametrize("env", [ASCII, {"PYTHONIOENCODING": "ascii"}, {"COLUMNS": "-1", "TERM": "dumb"}], ids=str)
def test_any_name_can_be_shown_anywhere(house: Path, name: str, env: dict[str, str]) -> None:
    shutil.move(house / BUNDLE, house / name)
    seen = tried_apart(["bundle", "show", name], house, env).held()
    assert seen.code == 0 and not seen.err, seen


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("$GEMEL bundle show b.safetensors >&-", 0, ""),
        ("$GEMEL bundle show b.safetensors <&- >/dev/null", 0, ""),
        ("$GEMEL bundle show absent 2>&-", 2, ""),
        ("$GEMEL bundle show absent 2>/dev/full", 2, ""),
        ("$GEMEL bundle show b.safetensors >/dev/full", 2, "gemel: standard output: cannot be written: No space left"),
        ("$GEMEL --help >/dev/full", 2, "gemel: standard output: cannot be written: No space left"),
        ("$GEMEL bundle show b.safetensors | head -c 1 >/dev/null; exit ${PIPESTATUS[0]}", 0, ""),
        ("ulimit -v 1200000; $GEMEL inspect workload.yaml", 2, "gemel: "),
        ("mkdir x; cd x; rmdir ../x; $GEMEL inspect w.yaml", 2, "gemel: "),
        ("ulimit -n 64; $GEMEL bundle show b.safetensors >/dev/null", 0, ""),
        ("echo 'raise SystemExit(9)' | tee torch.py models.py; $GEMEL bundle show b.safetensors >/dev/null", 0, ""),
    ],
)  # fmt: skip
def test_outputs_folders_and_limits(house: Path, line: str, code: int, said: str) -> None:
    seen = shell(line, house)
    assert seen.returncode == code and TRACEBACK not in seen.stderr, seen
    assert seen.stderr.startswith(said) and seen.stderr.count("\n") == bool(said), seen


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_and_a_second_one_end_a_process_with_one_line_and_exit_code_130(tmp_path: Path, number: int) -> None:
    os.mkfifo(tmp_path / "wait")

    def interrupt(process: subprocess.Popen[bytes]) -> None:
        with open(tmp_path / "wait", "wb"):  # it reads: the command is under way
            process.send_signal(number)
            process.send_signal(number)
            for _ in range(12):  # Python swallows what is raised in a finaliser: whoever waits tries once more
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                    return
                process.send_signal(number)

    script = (
        f"import signal; signal.signal({number}, signal.SIG_DFL)  # whoever started the tests may ignore it\n"
        "import gemel.api as api; api.inspect = lambda *_: open('wait').read()\n"
        "import sys; from gemel.cli import main; sys.exit(main())"
    )
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [sys.executable, "-c", script, "inspect", "w.yaml"], cwd=tmp_path, env=env, stderr=subprocess.PIPE
    )
    interrupt(process)
    assert process.stderr is not None
    with process.stderr as err:
        assert (process.returncode, err.read()) == (130, b"gemel: interrupted\n")
