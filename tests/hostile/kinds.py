"""The kinds of files that are damaged: a valid sample, how to damage it, and the commands that read it.

`DamageRunner.evaluate` runs one command on a damaged file and asserts what holds for every input: it is refused in one
line that names it (exit code 2), found wanting (1) or accepted (0), within the bounds of time and memory, and only the
command's own outputs change.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from gemel.models.errors import one_line
from tests.hostile import codecs, samples
from tests.hostile.harness import CommandResult, run_command
from tests.hostile.mutations import damage_bytes

Command = Sequence[object]
Damage = Callable[[bytes, Random], bytes]
MERGE_ONE = ("merge", "one.yaml", "-o", "new", "--method", "none")
MERGE_DETECTOR = ("merge", "detector.yaml", "-o", "new", "--method", "none")
APPLY = ("bundle", "apply", samples.OLD, samples.UPDATE, "-o", "new")
NEW = ("new", "new.log.jsonl")


@dataclass(frozen=True)
class Kind:
    """`file` is damaged and read by `commands`, which may write `outputs` (patterns).

    `named`: a refusal names the file. `progress`: lines of progress may precede the refusal.
    """

    file: str
    damage: Damage
    commands: tuple[Command, ...]
    outputs: tuple[str, ...] = ()
    named: bool = True
    progress: bool = False


BUNDLES: tuple[Command, ...] = (
    ("bundle", "verify", samples.BUNDLE), ("bundle", "show", samples.BUNDLE),
    ("bundle", "show", samples.BUNDLE, "--sets"), ("plan", samples.BUNDLE, "--device", "orin-nano-8gb"),
    ("run", "box.yaml", "--check"), ("simulate", samples.BUNDLE, "--duration", 2),
)  # fmt: skip
KINDS = {
    "manifest": Kind(samples.BUNDLE, codecs.BUNDLE.damage, BUNDLES),
    "bundle": Kind(samples.BUNDLE, damage_bytes, BUNDLES),
    "update": Kind(samples.UPDATE, codecs.BUNDLE.damage, (APPLY,), ("new",)),
    "updated bundle": Kind(samples.OLD, codecs.BUNDLE.damage, (
        APPLY, ("bundle", "diff", samples.OLD, samples.BUNDLE),
        ("bundle", "verify", samples.OLD, "--public-key", "box-key.pub"),
    ), ("new",), named=False),
    "private key": Kind("box-key", damage_bytes, (
        ("bundle", "sign", samples.BUNDLE, "--key", "box-key"),
    ), (samples.BUNDLE,)),
    "public key": Kind("box-key.pub", damage_bytes, (
        ("bundle", "verify", samples.OLD, "--public-key", "box-key.pub"),
    )),
    "profile": Kind(f"{samples.BUNDLE}.profile.json", codecs.JSON.damage, (
        ("plan", samples.BUNDLE), ("simulate", samples.BUNDLE, "--duration", 2), ("run", "box.yaml", "--check"),
    )),
    "log": Kind(f"{samples.BUNDLE}.log.jsonl", codecs.LINES.damage, (
        ("bundle", "show", samples.BUNDLE), ("bundle", "show", samples.BUNDLE, "--sets"),
        ("bundle", "show", samples.BUNDLE, "--json"),
    )),
    "trace": Kind("trace.jsonl", codecs.LINES.damage, (("simulate", "--replay", "trace.jsonl"),)),
    "annotations": Kind(
        "data/d/test/annotations.json", codecs.JSON.damage, (MERGE_DETECTOR,), NEW, named=False, progress=True
    ),
    "image": Kind("data/a/test/busy/u0__0busy.png", codecs.damage_png, (MERGE_ONE,), NEW, progress=True),
    "jpeg": Kind("data/d/val/images/u0__0.jpg", damage_bytes, (MERGE_DETECTOR,), NEW, progress=True),
    "sample": Kind(samples.SAMPLE, codecs.damage_sample, (
        ("drift", "check", "spool", "one.yaml", "--bundle", samples.OLD),
    ), ("spool/drift.json", "spool/drift-state.json"), named=False, progress=True),
    "report": Kind(f"{samples.REPORT}/report.json", codecs.JSON.damage, (
        ("report", samples.REPORT, "-o", "new"), ("report", samples.REPORT, "-o", "new", "--json"),
    ), ("new",)),
    "clip": Kind("gate.mp4", damage_bytes, (("run", "box.yaml", "--check"),), named=False),
    "safetensors": Kind("weights/a.safetensors", codecs.SAFETENSORS.damage, (("inspect", "one.yaml", "--weights"),)),
    "pt": Kind("weights/b.pt", codecs.TORCH.damage, (("inspect", "merge.yaml", "--weights"),)),
    "onnx": Kind("graph.onnx", codecs.ONNX.damage, (("inspect", "graph.yaml"), ("inspect", "graph.yaml", "--weights"))),
    "pt2": Kind("program.pt2", codecs.damage_program, (("inspect", "program.yaml"),)),
}  # fmt: skip


@dataclass(frozen=True)
class DamageCase:
    """A damaged file and the command that is to read it."""

    kind: str
    command: Command
    data: bytes


def draw_case(name: str, house: Path, random: Random) -> DamageCase:
    """A case of this kind, made of the undamaged file."""
    kind = KINDS[name]
    return DamageCase(name, random.choice(kind.commands), kind.damage((house / kind.file).read_bytes(), random))


class DamageRunner:
    """A copy of the sample folder in which cases run one after the other; each finds it undamaged."""

    def __init__(self, whole: Path, folder: Path) -> None:
        self.whole, self.folder = whole, folder
        self._renew()

    def evaluate(self, case: DamageCase) -> int:
        """The exit code of a case that passes all assertions; exceptions of the command escape."""
        kind = KINDS[case.kind]
        path = self.folder / kind.file
        path.unlink()
        path.write_bytes(case.data)
        whole = False
        try:
            result = run_command(case.command, self.folder)
            whole = not result.changed
            _check(kind, path, self.folder, result.check_bounds())
            return result.code
        finally:
            if whole:
                path.unlink()
                shutil.copyfile(self.whole / kind.file, path)
            else:
                self._renew()

    def _renew(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        samples.copy_house(self.whole, self.folder)


def _check(kind: Kind, path: Path, house: Path, result: CommandResult) -> None:
    lines = result.err.splitlines(keepends=True)
    assert all(line.isprintable() for line in (result.err + result.out).split("\n")), result
    if result.code == 2:
        last = dataclasses.replace(result, err=lines[-1] if lines else "")
        line = (last if kind.progress else result).check_refused()
        assert line.startswith("gemel: ") and ": " in line[len("gemel: ") :], line
        named = (str(path), os.path.relpath(path, house))
        assert not kind.named or any(one_line(name) in line for name in named), f"{path} is not named: {line}"
    else:
        assert result.code in (0, 1), result
        made = [os.path.relpath(name, house) for name in result.changed]
        assert all(any(fnmatch.fnmatch(name, one) for one in kind.outputs) for name in made), (made, result)
