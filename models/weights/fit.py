"""Whether the tensors of a weights file are those of a query's architecture and class list."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from models.errors import InputError
from models.zoo.registry import ENTRIES

if TYPE_CHECKING:
    from models.workload import Query

COUNTER = "num_batches_tracked"
DENSE_LAYER = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")
"""DenseNet's published tensors are called norm.1 and conv.2 where its parts have been called norm1 and conv2 since."""
SHOWN = 2
OTHER_WEIGHTS = "give weights of this architecture, or correct `model` and `model_args`"


def without_wrapper(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state without what stands before all of its names because the model was saved inside something else.

    `module.` of DataParallel, `_orig_mod.` of torch.compile, the attribute of a LightningModule: taken off until one
    of `own`'s names is met, and left where none is.
    """
    found = dict(state)
    while not found.keys() & own.keys():
        prefix = next(iter(found), "").partition(".")[0] + "."
        if not all(name.startswith(prefix) for name in found):
            return dict(state)
        found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    return found


def current_names(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state under the names that the architecture has today; published files of years ago have older ones.

    torchvision's parts (feature pyramids, the region proposal head, attention's MLP) rename their own.
    """
    found = {DENSE_LAYER.sub(r"\1\2", name): tensor for name, tensor in state.items()}
    for path, part in module.named_modules():
        renames = type(part)._load_from_state_dict is not nn.Module._load_from_state_dict
        if renames and not part._parameters and not part._buffers:  # with tensors of its own it would load them
            part._load_from_state_dict(found, f"{path}." if path else "", {}, False, [], [], [])
    return found


def without_extras(model: str, state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state without what nobody needs: a zoo model's auxiliary heads, and counters that the architecture lacks."""
    entry = ENTRIES.get(model)
    prefixes = entry.auxiliary if entry is not None else ()
    return {
        name: tensor
        for name, tensor in state.items()
        if name in own or not (name.startswith(prefixes) or name.endswith(COUNTER))
    }


def check_fit(query: Query, key: str, own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Raise InputError, saying how many tensors differ and how, unless `state` is one of `own`'s architecture."""
    missing = [name for name in own if name not in state and not name.endswith(COUNTER)]
    unknown = [name for name in state if name not in own]
    wrong = [name for name, tensor in state.items() if name in own and tensor.shape != own[name].shape]
    if wrong and not missing and not unknown and _only_heads(wrong, own, state):
        differing = _listed([_both(name, own, state) for name in wrong])
        fault = f"only the head does not fit the class list ({len(query.classes)} in the query): {differing}"
        remedy = "list in `classes` the classes these weights were trained for, or give them as `init:` and train"
        raise InputError(str(query.weights), fault, remedy, key)
    faults = []
    if missing:
        shown = _listed([f"{name} {tuple(own[name].shape)}" for name in missing])
        faults.append(f"lacks {len(missing)} of the {len(own)} tensors of {query.model}: {shown}")
    if unknown:
        shown = _listed([f"{name} {tuple(state[name].shape)}" for name in unknown])
        faults.append(f"has {len(unknown)} that {query.model} does not know: {shown}")
    if wrong:
        shown = _listed([_both(name, own, state) for name in wrong])
        faults.append(f"{len(wrong)} of {len(own)} tensors have another shape in {query.model}: {shown}")
    if faults:
        raise InputError(str(query.weights), "; ".join(faults), OTHER_WEIGHTS, key)


def _only_heads(wrong: Sequence[str], own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> bool:
    """Whether these differ in their outputs alone; a network of other widths throughout differs in its inputs, too."""
    return all(own[name].ndim == state[name].ndim and state[name].shape[1:] == own[name].shape[1:] for name in wrong)


def _both(name: str, own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    return f"{name} is {tuple(state[name].shape)} and should be {tuple(own[name].shape)}"


def _listed(shown: Sequence[str]) -> str:
    """`a`, or `a, b and 12 more`."""
    rest = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return ", ".join(shown[:SHOWN]) + rest
