"""The kinds of files that are damaged: of each one of the house, how, and which commands read it.

`judged` tries a damaged file with one command and asserts what holds of every input: it is refused in one line that
names it (exit code 2), found wanting (1) or taken (0), within the bounds of time and memory, and whatever comes of it
nothing is changed but what the command is there to write.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from models.errors import one_line
from tests.hostile import samples
from tests.hostile.harness import Seen, tried
from tests.hostile.mutated import codecs
from tests.hostile.mutated.mutations import damaged_bytes

Command = Sequence[object]
Damage = Callable[[bytes, Random], bytes]
MERGE_ONE = ("merge", "one.yaml", "-o", "new", "--method", "none")
MERGE_DETECTOR = ("merge", "detector.yaml", "-o", "new", "--method", "none")
APPLY = ("bundle", "apply", samples.OLD, samples.UPDATE, "-o", "new")
PLACE = ("place", "fleet.yaml", "-o", "new", "--max-seconds", 1)
NEW = ("new", "new.log.jsonl")


@dataclass(frozen=True)
class Kind:
    """`file` is damaged and read by `commands`, which may write what `makes` names (patterns); `told`: a refusal names
    the file (else what it leads to), `progress`: lines before the last may tell how far the command came.
    """

    file: str
    damage: Damage
    commands: tuple[Command, ...]
    makes: tuple[str, ...] = ()
    told: bool = True
    progress: bool = False


BUNDLES: tuple[Command, ...] = (
    ("bundle", "verify", samples.BUNDLE), ("bundle", "show", samples.BUNDLE),
    ("bundle", "show", samples.BUNDLE, "--sets"), ("plan", samples.BUNDLE, "--device", "orin-nano-8gb"),
    ("run", "box.yaml", "--check"), ("simulate", samples.BUNDLE, "--duration", 2),
)  # fmt: skip
KINDS = {
    "workload": Kind("workload.yaml", codecs.YAML.damaged, (
        ("inspect", "workload.yaml"), ("inspect", "workload.yaml", "--weights"), ("plan", "workload.yaml"),
        ("simulate", "workload.yaml", "--duration", 2, "--shared"),
    ), told=False),
    "workload of a merge": Kind("one.yaml", codecs.YAML.damaged, (MERGE_ONE,), NEW, told=False, progress=True),
    "box config": Kind("box.yaml", codecs.YAML.damaged, (
        ("run", "box.yaml", "--check"), ("bundle", "verify", samples.BUNDLE, "--config", "box.yaml"),
    ), told=False),
    "fleet": Kind("fleet.yaml", codecs.YAML.damaged, (PLACE,), ("new", "new/*"), told=False),
    "placement": Kind(f"{samples.PLACED}/placement.json", codecs.JSON.damaged, (
        (*PLACE, "--from", samples.PLACED), (*PLACE, "--from", samples.PLACED, "--objective", "fair"),
    ), ("new", "new/*")),
    "manifest": Kind(samples.BUNDLE, codecs.BUNDLE.damaged, BUNDLES),
    "bundle": Kind(samples.BUNDLE, damaged_bytes, BUNDLES),
    "update": Kind(samples.UPDATE, codecs.BUNDLE.damaged, (APPLY,), ("new",)),
    "updated bundle": Kind(samples.OLD, codecs.BUNDLE.damaged, (
        APPLY, ("bundle", "diff", samples.OLD, samples.BUNDLE),
        ("bundle", "verify", samples.OLD, "--public-key", "box-key.pub"),
    ), ("new",), told=False),
    "private key": Kind("box-key", damaged_bytes, (
        ("bundle", "sign", samples.BUNDLE, "--key", "box-key"),
    ), (samples.BUNDLE,)),
    "public key": Kind("box-key.pub", damaged_bytes, (
        ("bundle", "verify", samples.OLD, "--public-key", "box-key.pub"),
    )),
    "profile": Kind(f"{samples.BUNDLE}.profile.json", codecs.JSON.damaged, (
        ("plan", samples.BUNDLE), ("simulate", samples.BUNDLE, "--duration", 2), ("run", "box.yaml", "--check"),
    )),
    "log": Kind(f"{samples.BUNDLE}.log.jsonl", codecs.LINES.damaged, (
        ("bundle", "show", samples.BUNDLE), ("bundle", "show", samples.BUNDLE, "--sets"),
        ("bundle", "show", samples.BUNDLE, "--json"),
    )),
    "trace": Kind("trace.jsonl", codecs.LINES.damaged, (("simulate", "--replay", "trace.jsonl"),)),
    "checkpoint": Kind(
        f"{samples.HALF}.work/state.pt", codecs.TORCH.damaged, (samples.RESUME,),
        (samples.HALF, f"{samples.HALF}.log.jsonl", f"{samples.HALF}.work", f"{samples.HALF}.work/*"), progress=True,
    ),
    "checkpoint head": Kind(
        f"{samples.HALF}.work/state.pt", codecs.damaged_head, (samples.RESUME,),
        (samples.HALF, f"{samples.HALF}.log.jsonl", f"{samples.HALF}.work", f"{samples.HALF}.work/*"), progress=True,
    ),
    "annotations": Kind(
        "data/d/test/annotations.json", codecs.JSON.damaged, (MERGE_DETECTOR,), NEW, told=False, progress=True
    ),
    "image": Kind("data/a/test/busy/u0__0busy.png", codecs.damaged_png, (MERGE_ONE,), NEW, progress=True),
    "jpeg": Kind("data/d/val/images/u0__0.jpg", damaged_bytes, (MERGE_DETECTOR,), NEW, progress=True),
    "sample": Kind(samples.SAMPLE, codecs.damaged_sample, (
        ("drift", "check", "spool", "one.yaml", "--bundle", samples.OLD),
    ), ("spool/drift.json",), told=False, progress=True),
    "ledger": Kind("spool/ledger.json", codecs.JSON.damaged, (
        ("drift", "check", "spool", "one.yaml", "-o", "new"),
    ), ("spool/drift.json", "new"), told=False, progress=True),
    "report": Kind(f"{samples.REPORT}/report.json", codecs.JSON.damaged, (
        ("report", samples.REPORT, "-o", "new"), ("report", samples.REPORT, "-o", "new", "--json"),
    ), ("new",)),
    "clip": Kind("gate.mp4", damaged_bytes, (("run", "box.yaml", "--check"),), told=False),
    "safetensors": Kind("weights/a.safetensors", codecs.SAFETENSORS.damaged, (("inspect", "one.yaml", "--weights"),)),
    "pt": Kind("weights/b.pt", codecs.TORCH.damaged, (("inspect", "merge.yaml", "--weights"),)),
    "darknet": Kind(samples.DARKNET, codecs.damaged_darknet, (("inspect", "yolo.yaml", "--weights"),)),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A damaged file and the command that is to read it."""

    kind: str
    command: Command
    data: bytes


def drawn(name: str, house: Path, random: Random) -> Case:
    """A case of this kind, made of the file in a whole house."""
    kind = KINDS[name]
    return Case(name, random.choice(kind.commands), kind.damage((house / kind.file).read_bytes(), random))


class Bench:
    """A copy of the house in which cases are judged one after the other; each finds it whole."""

    def __init__(self, whole: Path, folder: Path) -> None:
        self.whole, self.folder = whole, folder
        self._renew()

    def judged(self, case: Case) -> int:
        """Its exit code, if all held that is asserted; what escapes the command escapes this."""
        kind = KINDS[case.kind]
        path = self.folder / kind.file
        path.unlink()
        path.write_bytes(case.data)
        whole = False
        try:
            seen = tried(case.command, self.folder)
            whole = not seen.changed
            _check(kind, path, self.folder, seen.held())
            return seen.code
        finally:
            if whole:
                path.unlink()
                samples.copy_file(self.whole / kind.file, path)
            else:
                self._renew()

    def _renew(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        samples.copy_house(self.whole, self.folder)


def _check(kind: Kind, path: Path, house: Path, seen: Seen) -> None:
    lines = seen.err.splitlines(keepends=True)
    assert all(line.isprintable() for line in (seen.err + seen.out).split("\n")), seen
    if seen.code == 2:
        last = Seen(seen.command, 2, seen.out, lines[-1] if lines else "", seen.seconds, seen.nbytes, seen.changed)
        line = (last if kind.progress else seen).refused()
        assert line.startswith("gemel: ") and ": " in line[len("gemel: ") :], line
        named = (str(path), os.path.relpath(path, house))
        assert not kind.told or any(one_line(name) in line for name in named), f"{path} is not named: {line}"
    else:
        assert seen.code in (0, 1), seen
        made = [os.path.relpath(name, house) for name in seen.changed]
        assert all(any(fnmatch.fnmatch(name, one) for one in kind.makes) for name in made), (made, seen)
