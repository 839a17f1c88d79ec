"""Weights that torchvision publishes, by name: found, fetched once, and verified by the digest in their name."""

from __future__ import annotations

import difflib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from gemel.models.errors import InputError
from gemel.models.notes import add_note
from gemel.models.zoo.registry import ENTRIES

PREFIX = "torchvision:"
_HASH = re.compile(r"-([0-9a-f]{8,})\.")


@dataclass(frozen=True)
class Published:
    """Weights that torchvision publishes, by their full name there, such as `ResNet50_Weights.IMAGENET1K_V2`."""

    name: str

    def __str__(self) -> str:
        return PREFIX + self.name

    def exists(self) -> bool:
        """Whether it can be read, as for a path; a published file is fetched when it is read."""
        return True

    @property
    def file_name(self) -> str:
        """The published file's name, which ends with the beginning of its SHA-256."""
        return Path(_torchvision_weights(self.name).url).name


def find_published(text: str, model: str, where: str | Path, key: str) -> Published:
    """The weights `torchvision:NAME` means for a zoo model.

    NAME is a member of the model's own weights there, DEFAULT, or the full name of another model's (`init` takes its
    backbone). Raises InputError, with the names there are, for one that does not exist.
    """
    import torchvision

    name = text.removeprefix(PREFIX)
    # A full name may be of another model.
    if "." in name:
        try:
            return _note_alias(
                Published(_full_name(torchvision.models.get_weight(name))), text, where, key
            )
        except (ValueError, KeyError) as error:
            example = "such as torchvision:ResNet18_Weights.IMAGENET1K_V1"
            raise InputError(
                where, f"torchvision publishes no '{name}'", f"give a full name {example}", key
            ) from error
    entry = ENTRIES.get(model)
    if entry is None or entry.published is None:
        hint = "give a file, or the full name of another model's weights, such as ResNet18_Weights.IMAGENET1K_V1"
        raise InputError(where, f"torchvision publishes no weights of {model}", hint, key)
    published = torchvision.models.get_model_weights(entry.published)
    names = [*published.__members__]
    if name not in names:
        near = difflib.get_close_matches(name.upper(), names, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        problem = f"torchvision publishes no weights '{name}' of {model}"
        raise InputError(where, problem, f"{hint}there are {', '.join(names)}", key)
    return _note_alias(Published(_full_name(published[name])), text, where, key)


def _note_alias(published: Published, text: str, where: str | Path, key: str) -> Published:
    """Note which of the published weights DEFAULT is."""
    if text.endswith("DEFAULT"):
        add_note(
            where,
            f"{key}: {text} is {published.name} in this release of torchvision",
            "name it in full to keep it",
        )
    return published


def fetch(published: Published, key: str = "weights") -> Path:
    """The file of these weights in torch's own cache; downloaded, and its hash checked, when it is not there yet.

    Raises InputError when it cannot be downloaded or stored.
    """
    import torch

    folder = Path(torch.hub.get_dir()) / "checkpoints"
    file = folder / published.file_name
    if file.is_file():
        return file
    digest = _HASH.search(file.name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(
            _torchvision_weights(published.name).url,
            str(file),
            digest and digest[1],
            progress=sys.stderr.isatty(),
        )
    except RuntimeError as error:  # torch raises it for a wrong hash
        raise InputError(
            str(published), "the download is damaged: its hash is another", "try again", key
        ) from error
    except OSError as error:  # no network, no such file there, no room here
        hint = f"try again with a network, or put {file.name} into {folder}"
        reason = getattr(error, "reason", None) or error.strerror or error
        raise InputError(str(published), f"cannot be downloaded ({reason})", hint, key) from error
    return file


def _torchvision_weights(name: str):
    import torchvision

    return torchvision.models.get_weight(name)


def _full_name(weights) -> str:
    return f"{type(weights).__name__}.{weights.name}"
