"""The state dict of one network among all that a weights file holds: found by names and shapes, averaged ones first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from gemel.models.errors import InputError, join_names
from gemel.models.files.checkpoint import MAX_NAME, PLAIN, StandIn, TensorRecord
from gemel.models.labels.class_names import StatedNames, find_names

FileTensor = Tensor | TensorRecord
FileState = Mapping[str, FileTensor]
MAX_DEPTH, MAX_PREFIX_PARTS, MAX_PREFIXES = 5, 8, 8
MAX_STATES = 2**12
"""Mappings with tensors that are looked at, the outermost first."""
MAX_NAMED, MAX_NAMES_DEPTH = 8, 3
"""Lists of classes that are compared, and how deep in the file they are looked for."""
WRAPPERS = (
    "",
    "state_dict",
    "model_state_dict",
    "model",
    "model_state",
    "net",
    "module",
    "weights",
    "checkpoint",
)
"""Keys under which training scripts keep the state dict in a checkpoint, the first preferred."""
UNUSUAL = len(WRAPPERS)
PREFIX_PARTS = frozenset((*WRAPPERS, "network", "_orig_mod"))
WRAPPED = re.compile(
    r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_fpw_module)\."
    r"|(?<=\.)_orig_mod\."
)
"""Parts of a tensor's name that FSDP, activation checkpointing and torch.compile put within it."""
FLAT = "_flat_param"
"""Ends the name of a tensor that holds all of a module's weights, as FSDP keeps them in each process."""
AVERAGED = re.compile(r"(?<![A-Za-z])(ema|swa|avg|averaged?)(?![a-z])|Ema|EMA|SWA")
"""In a key or prefix of a moving average: state_dict_ema, model_ema, params_ema, ema_model., EMACallback."""


@dataclass(frozen=True)
class Candidate:
    """Tensors of a file, under one key and one prefix, by the names that remain; `fit` counts those that fit.

    `left_out` are the other tensors under the same key. `renamed` counts those that had the prefix; or that got
    `wrapper`, a prefix of the network's names, before theirs.
    """

    path: str
    prefix: str
    state: FileState
    left_out: tuple[str, ...]
    is_averaged: bool
    fit: int
    renamed: int = 0
    wrapper: str = ""

    @property
    def label(self) -> str:
        """Where in the file its tensors are."""
        return f"'{self.path}{'.' if self.path and self.prefix else ''}{self.prefix}{'*' if self.prefix else ''}'"

    @property
    def rank(self) -> tuple[int, int]:
        """Its place among those that fit alike: by the key, then by the prefix; UNUSUAL for any other."""
        is_usual = all(part in PREFIX_PARTS for part in self.prefix.split("."))
        return WRAPPERS.index(self.path) if self.path in WRAPPERS else UNUSUAL, (
            not is_usual
        ) * UNUSUAL


@dataclass(frozen=True)
class StateChoice:
    """The candidate to load, and the note on how it was found: empty where there was nothing to choose or remove."""

    candidate: Candidate
    note: str
    hint: str


@dataclass(frozen=True)
class FileStates:
    """The mappings of a file that hold tensors, the outermost first, each with the keys that lead to it.

    `kind` is the type of the whole content, "dict" for any mapping; `class_names` is what it says of its classes.
    `is_swapped`: what is called `state_dict` is the average, as mmengine's EMAHook and Lightning's WeightAveraging swap
    when they save.
    """

    states: tuple[tuple[str, dict[str, FileTensor]], ...]
    kind: str = "dict"
    is_swapped: bool = False
    class_names: tuple[StatedNames, ...] = ()

    @property
    def outermost(self) -> dict[str, FileTensor]:
        """The tensors under no key."""
        return next((tensors for path, tensors in self.states if not path), {})


def find_states(content: Any) -> FileStates:
    """The states in what a file holds, at most MAX_STATES."""
    kind = "dict" if isinstance(content, dict) else type(content).__name__
    states = tuple(islice(_walk_states(content), MAX_STATES))
    return FileStates(
        states, kind, _is_swapped(content), tuple(islice(_walk_names(content), MAX_NAMED))
    )


def _walk_names(content: Any) -> Iterator[StatedNames]:
    """What the mappings in the content say of the classes, the outermost first."""
    queue: list[tuple[int, Any]] = [(0, content)]
    for depth, value in islice(queue, MAX_STATES):
        items = {**value, **value.attributes} if isinstance(value, StandIn) else value
        if not isinstance(items, dict):
            continue
        if stated := find_names(items):
            yield stated
        if depth < MAX_NAMES_DEPTH:
            queue += [(depth + 1, item) for item in items.values() if isinstance(item, dict)]


def choose_state(
    states: FileStates,
    names: Sequence[Collection[str]],
    rename: Callable[[FileState], FileState],
    count_fit: Callable[[FileState], int],
    where: Path,
    key: str,
) -> StateChoice:
    """The one of a file's states that most tensors of a network fit.

    `names` are those of the network, and others to look for where a file has none of them; `rename` gives a state
    today's names, `count_fit` counts the tensors that fit.
    Of several that fit alike, the moving average is taken, then the one under the most usual key. Raises InputError
    when there are no tensors, and when neither rule decides.
    """
    candidates = [
        candidate
        for path, tensors in states.states
        for candidate in _split_by_prefix(
            path, tensors, names, rename, count_fit, states.is_swapped
        )
    ]
    if not candidates:
        problem = "holds no tensors" if states.kind == "dict" else f"holds a {states.kind}"
        raise InputError(where, problem, PLAIN, key)
    best = max(candidate.fit for candidate in candidates)
    if flat := next(
        (name for candidate in candidates for name in candidate.state if name.endswith(FLAT)), None
    ):
        problem = (
            f"holds FSDP's weights in one piece ({flat:.80}), which says nothing of its layers"
        )
        raise InputError(where, problem, "save it with StateDictType.FULL_STATE_DICT", key)
    # Nothing fits: the largest state makes the best message.
    if best == 0:
        return StateChoice(max(candidates, key=lambda candidate: len(candidate.state)), "", "")
    fitting = _drop_copies([candidate for candidate in candidates if candidate.fit == best])
    pool = [candidate for candidate in fitting if candidate.is_averaged] or fitting
    pool.sort(key=lambda candidate: candidate.rank)
    # The most usual key of training scripts comes first.
    chosen = pool[0]
    # Of several averages, or of places that no training script usually writes, none is the obvious one.
    if len(pool) > 1 and (
        chosen.is_averaged or chosen.rank == pool[1].rank or UNUSUAL in chosen.rank
    ):
        labels = join_names([candidate.label for candidate in pool])
        raise InputError(
            where,
            f"holds {len(pool)} state dicts that fit alike: {labels}",
            f"{PLAIN}, of the one",
            key,
        )
    rivals = [candidate.label for candidate in fitting if candidate is not chosen]
    partial = [
        candidate.label
        for candidate in candidates
        if candidate.is_averaged and not chosen.is_averaged and best / 2 < candidate.fit < best
    ]
    return StateChoice(chosen, *_describe(chosen, rivals, partial))


def _describe(chosen: Candidate, rivals: list[str], partial: list[str]) -> tuple[str, str]:
    """Note and hint on a choice."""
    parts: list[str] = []
    if chosen.is_averaged:
        parts += [f"EMA weights taken (under {chosen.label}); {len(chosen.state)} tensors"]
    elif rivals or partial:
        parts += [f"weights under {chosen.label} taken; {len(chosen.state)} tensors"]
    elif chosen.prefix:
        parts += [f"the prefix {chosen.prefix} was removed from {chosen.renamed} tensors"]
    if chosen.wrapper:
        parts += [
            f"the prefix {chosen.wrapper} of the model's names was put before {chosen.renamed} tensors"
        ]
    if rivals:
        parts += [f"{join_names(rivals)} would fit as well"]
    if partial:
        parts += [f"the average under {join_names(partial)} does not fit in full"]
    return "; ".join(
        parts
    ), "to use others, save them alone in a file" if rivals or chosen.is_averaged else ""


def _walk_states(content: Any) -> Iterator[tuple[str, dict[str, FileTensor]]]:
    """Every mapping in the content that holds tensors, with the keys that lead to it; each mapping once."""
    seen: set[int] = set()
    queue: list[tuple[tuple[str, ...], Any]] = [((), content)]
    for keys, value in queue:
        if not isinstance(value, dict) or id(value) in seen or len(keys) > MAX_DEPTH:
            continue
        seen.add(id(value))
        items: dict[str, Any] = value
        if isinstance(value, StandIn) and id(value.attributes) not in seen:
            seen.add(id(value.attributes))
            is_module = {"_parameters", "_modules"} <= value.attributes.keys()
            items = (
                dict(_module_tensors(value, seen)) if is_module else {**value, **value.attributes}
            )
        tensors = {
            WRAPPED.sub("", name): value
            for name, value in items.items()
            if isinstance(value, Tensor | TensorRecord)
        }
        if tensors:
            yield ".".join(keys), tensors
        queue += [
            ((*keys, name), value)
            for name, value in items.items()
            if isinstance(value, dict) and name != "_metadata"
        ]


def _module_tensors(module: StandIn, seen: set[int]) -> Iterator[tuple[str, FileTensor]]:
    """The tensors of a whole nn.Module that was pickled, under the names of its state dict."""
    queue = [("", module)]
    for prefix, child in queue:
        for kind in ("_parameters", "_buffers", "_modules") if isinstance(child, StandIn) else ():
            part = child.attributes.get(kind)
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            yield from (
                (prefix + name, tensor)
                for name, tensor in part.items()
                if isinstance(tensor, TensorRecord)
            )
            queue += [(f"{prefix}{name}."[:MAX_NAME], child) for name, child in part.items()]


def _is_swapped(content: Any) -> bool:
    """Whether `state_dict` is the average (FileStates)."""
    if not isinstance(content, dict):
        return False
    meta = content.get("meta")
    mmengine = "message_hub" in content or (isinstance(meta, dict) and "mmengine_version" in meta)
    return (mmengine and "ema_state_dict" in content) or {
        "averaging_state",
        "current_model_state",
    } <= content.keys()


def _split_by_prefix(
    path: str,
    tensors: dict[str, FileTensor],
    names: Sequence[Collection[str]],
    rename: Callable[[FileState], FileState],
    count_fit: Callable[[FileState], int],
    is_swapped: bool,
) -> Iterator[Candidate]:
    """A candidate for each prefix after which names of the network follow: `module.`, `model.`, `ema_model.module.`.

    Prefixes come from DataParallel, torch.compile, AveragedModel and the attributes of a LightningModule; and in the
    network's own names from a class that wraps it.
    """
    split = _PrefixSplit(path, tensors, rename, count_fit, is_swapped)
    network_names = next(
        (
            namespace
            for namespace in names
            if any(bare_name in namespace for name in tensors for _, bare_name in _cuts(name))
        ),
        (),
    )
    plain = list(split.candidates({name: name for name in network_names})) or [
        Candidate(path, "", tensors, (), False, 0)
    ]
    yield from plain
    firsts = Counter(name.partition(".")[0] + "." for name in names[0])
    for wrapper in (first for first, count in firsts.items() if 2 * count >= len(names[0])):
        wrapped = split.candidates({name.removeprefix(wrapper): name for name in names[0]}, wrapper)
        yield from (
            candidate
            for candidate in wrapped
            if candidate.fit > max(candidate.fit for candidate in plain)
        )


@dataclass(frozen=True)
class _PrefixSplit:
    """The candidates among the tensors under one key."""

    path: str
    tensors: dict[str, FileTensor]
    rename: Callable[[FileState], FileState]
    count_fit: Callable[[FileState], int]
    is_swapped: bool

    def candidates(
        self, network_names: Mapping[str, str], wrapper: str = ""
    ) -> Iterator[Candidate]:
        """One for each prefix of the file's names; `network_names` gives the network's name of a name without it.

        Names that the network knows and that lack the prefix are taken as they are, unless the others are an average.
        """
        hits = Counter(
            prefix
            for name in self.tensors
            for prefix, bare_name in _cuts(name)
            if bare_name in network_names
        )
        for prefix, _ in hits.most_common(MAX_PREFIXES):
            bare_names = {
                name: name.removeprefix(prefix) for name in self.tensors if name.startswith(prefix)
            }
            counter = f"{prefix.removesuffix('module.')}n_averaged"
            is_averaged = bool(AVERAGED.search(f"{self.path}.{prefix}")) or counter in self.tensors
            if self.is_swapped:
                is_averaged = self.path == "state_dict"
            # A head beside a wrapped backbone has no prefix.
            if not is_averaged and prefix:
                bare = set(bare_names.values())
                bare_names |= {
                    name: name
                    for name in self.tensors
                    if name in network_names and name not in bare | bare_names.keys()
                }
            names = {name: network_names.get(bare, bare) for name, bare in bare_names.items()}
            renamed = sum(name != new_name for name, new_name in names.items())
            yield self._candidate(prefix, names, is_averaged, renamed, wrapper)
            flat = {new_name.replace(".", ""): new_name for new_name in names.values()}
            parts = ((name, *name.partition(".")) for name in self.tensors)
            average = {
                name: flat[flat_name]
                for name, head, _, flat_name in parts
                if flat_name in flat and AVERAGED.search(head)
            }
            # LitEma's, which has no dots in its names and no buffers.
            if average and not is_averaged:
                head = f"{next(iter(average)).partition('.')[0]}."
                new = set(average.values())
                remaining = {
                    name: new_name
                    for name, new_name in names.items()
                    if new_name not in new and not name.startswith(head)
                }
                yield self._candidate(head, remaining | average, True, len(average), wrapper)

    def _candidate(
        self, prefix: str, names: Mapping[str, str], is_averaged: bool, renamed: int, wrapper: str
    ) -> Candidate:
        state = self.rename({new_name: self.tensors[name] for name, new_name in names.items()})
        left_out = tuple(name for name in self.tensors if name not in names)
        return Candidate(
            self.path, prefix, state, left_out, is_averaged, self.count_fit(state), renamed, wrapper
        )


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """A name cut after each of its first parts, into prefix and rest."""
    name = remainder = name[:MAX_NAME]
    for _ in range(MAX_PREFIX_PARTS):
        yield name[: len(name) - len(remainder)], remainder
        remainder = remainder.partition(".")[2]
        if not remainder:
            return


def _drop_copies(candidates: list[Candidate]) -> list[Candidate]:
    """The candidates without those whose tensors are the same ones in the file as an earlier candidate's."""
    distinct: dict[frozenset[Any], Candidate] = {}
    for candidate in sorted(candidates, key=lambda candidate: candidate.rank):
        places = (
            (name, id(tensor.storage), tensor.offset, tensor.shape)
            if isinstance(tensor, TensorRecord)
            else (name, id(tensor))
            for name, tensor in candidate.state.items()
        )
        distinct.setdefault(frozenset(places), candidate)
    return list(distinct.values())
