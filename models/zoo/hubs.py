"""Classifiers of timm and of Hugging Face's transformers, which are imported only for them.

They are built without weights, from names and numbers alone, so that a bundle of others may name one. Weights and
preprocessing come from timm's own config and its cache, or from a local folder as `save_pretrained` writes it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemel.models.errors import InputError
from gemel.models.files.io import read_json
from gemel.models.notes import add_note
from gemel.models.zoo.registry import MAX_NUMBER, built_on, check_size

if TYPE_CHECKING:
    import torch
    from torch import nn

    from gemel.models.preprocess import Size

TIMM, HF = "timm/", "hf/"
NAME = re.compile(r"[a-z0-9_]+(\.[A-Za-z0-9_]+)?")
CONFIG = "config"
"""The model argument that holds a Hugging Face config, so that a box needs no folder."""
CONFIG_FILE, PROCESSOR_FILE = "config.json", "preprocessor_config.json"
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
DROPPED = (
    "id2label",
    "label2id",
    "auto_map",
    "quantization_config",
    "dtype",
    "torch_dtype",
    "transformers_version",
)
"""Keys of a config that do not belong to the architecture."""
MAX_DEPTH, MAX_TEXT, MAX_ITEMS = 4, 200, 1000
WARPED_FROM = 384
"""ConvNeXt's processor squashes frames to sizes from this on, and crops below."""


@dataclass(frozen=True)
class HubModel:
    """What a hub says of a model: `preprocess` without the size; `weights` None where there are none."""

    size: Size | None
    preprocess: dict[str, Any] = field(default_factory=dict)
    weights: Path | None = None
    model_args: dict[str, Any] = field(default_factory=dict)


def is_hub_model(model: str) -> bool:
    """Whether a model is one of timm's or a folder of Hugging Face's."""
    return model.startswith((TIMM, HF))


def read_hub(model: str, root: Path, size: Size | None = None) -> HubModel:
    """What the hub says of a query's model; `root` is the workload's folder, `size` the input that the query asks for.

    Raises InputError for a name or folder that is none, and without the package.
    """
    return _read_timm(model, size) if model.startswith(TIMM) else _read_hf(model, root)


def build_hub(
    model: str, width: int, args: Mapping[str, Any], task: str, device: str | torch.device = "cpu"
) -> nn.Module:
    """A hub's classifier with random weights; its forward gives logits (N, width).

    Raises InputError for another task, arguments that are no plain bounded values, and a size above the zoo's limit.
    """
    if task != "classification":
        hint = "export it as .onnx and give that file as `model`"
        raise InputError(
            model, f"is a classifier here; {task} is not built from a hub's name", hint, "task"
        )
    if not _is_plain(args, MAX_DEPTH) or any(
        name.startswith(("pretrained", "checkpoint", "features")) for name in args
    ):
        raise InputError(
            model, "takes bounded numbers and words alone", "correct `model_args`", "model_args"
        )
    make = _make_timm if model.startswith(TIMM) else _make_hf
    try:
        with built_on("meta"):
            module = make(model, width, dict(args))
        check_size(model, module)
        with built_on(device):
            return module if str(device) == "meta" else make(model, width, dict(args))
    except InputError:
        raise
    except Exception as error:  # arguments can contradict each other in many ways
        text = " ".join(str(error).split())[:200]
        raise InputError(
            model, f"cannot be built: {text}", "correct `model` or `model_args`", "model_args"
        ) from error


def _require(package: str, extra: str, model: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise InputError(
            model, f"needs {package}", f"pip install 'gemel[{extra}]'", "model"
        ) from error


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, Mapping):
        return (
            depth > 0
            and len(value) <= MAX_ITEMS
            and all(_is_plain(item, depth - 1) for item in value.values())
        )
    if isinstance(value, list | tuple):
        return (
            depth > 0
            and len(value) <= MAX_ITEMS
            and all(_is_plain(item, depth - 1) for item in value)
        )
    if isinstance(value, str):
        return len(value) <= MAX_TEXT and "/" not in value
    return value is None or (isinstance(value, bool | int | float) and abs(value) <= MAX_NUMBER)


# timm


def _timm_name(model: str) -> str:
    timm = _require("timm", "timm", model)
    name = model.removeprefix(TIMM)
    if not NAME.fullmatch(name) or not timm.is_model(name.partition(".")[0]):
        near = (
            timm.list_models(f"*{name.partition('.')[0][:8]}*")[:3] if NAME.fullmatch(name) else []
        )
        hint = f"did you mean {', '.join(near)}?" if near else "timm.list_models() names them"
        raise InputError(model, "is no name of a model of timm", hint, "model")
    return name


def _make_timm(model: str, width: int, args: dict[str, Any]) -> nn.Module:
    name = _timm_name(model)
    return _require("timm", "timm", model).create_model(
        name, pretrained=False, num_classes=width, **args
    )


def _read_timm(model: str, size: Size | None) -> HubModel:
    name = _timm_name(model)
    config = _require("timm.models", "timm", model).get_pretrained_cfg(name)
    published_size = tuple(config.input_size[1:])
    fraction = float(config.crop_pct)
    resize = (
        "center-crop"
        if config.crop_mode == "center"
        else "letterbox"
        if config.crop_mode == "border"
        else "stretch"
    )
    _note_resampling(model, config.interpolation)
    args = (
        {"img_size": list(size)}
        if size and size != published_size and config.fixed_input_size
        else {}
    )
    keys = {"resize": resize, "mean": tuple(config.mean), "std": tuple(config.std)}
    if resize == "center-crop":
        keys["crop_fraction"] = min(fraction, 1.0)
    return HubModel(published_size, keys, _find_cached(config), args)


def _find_cached(config: Any) -> Path | None:
    """The published weights of a model of timm's in the caches of Hugging Face and torch; nothing is downloaded."""
    from torch.hub import get_dir

    hub = _require("huggingface_hub", "timm", TIMM)
    for name in (config.hf_hub_filename, *WEIGHT_FILES) if config.hf_hub_id else ():
        if name and isinstance(cached := hub.try_to_load_from_cache(config.hf_hub_id, name), str):
            return Path(cached)
    path = Path(get_dir(), "checkpoints", config.url.rpartition("/")[2]) if config.url else None
    return path if path is not None and path.is_file() else None


# Hugging Face


def _make_hf(model: str, width: int, args: dict[str, Any]) -> nn.Module:
    transformers = _require("transformers", "hf", model)
    settings = {
        name: value
        for name, value in args.pop(CONFIG, {}).items()
        if name not in DROPPED and name[0] != "_"
    }
    if args:
        raise InputError(
            model, f"takes no argument '{next(iter(args))[:60]}'", "take it out", "model_args"
        )
    kind = str(settings.pop("model_type", ""))
    config = transformers.AutoConfig.for_model(
        kind, **{**settings, "num_labels": width, "return_dict": True}
    )
    module = transformers.AutoModelForImageClassification.from_config(config)

    base = type(module)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return base.forward(self, pixel_values=x).logits

    # Names of tensors stay.
    module.__class__ = type(f"{base.__name__}Logits", (base,), {"forward": forward})
    return module


def _read_hf(model: str, root: Path) -> HubModel:
    folder = root / model.removeprefix(HF)
    hint = "give a local folder as `save_pretrained` writes it, relative to the workload file"
    if not folder.is_dir():
        raise InputError(folder, "is no folder", hint, "model")
    config = read_json(folder / CONFIG_FILE, hint, foreign=True)
    class_names = [str(name) for name in config.get("architectures") or ()]
    if class_names and not any(name.endswith("ForImageClassification") for name in class_names):
        other = "export it as .onnx and give that file as `model`"
        raise InputError(
            folder, f"holds a {class_names[0]:.60}, no image classifier", other, "model"
        )
    has_weights = any((folder / name).exists() for name in WEIGHT_FILES)
    size = None
    keys = {}
    if (folder / PROCESSOR_FILE).exists():
        size, keys = _read_processor(model, read_json(folder / PROCESSOR_FILE, hint, foreign=True))
    settings = {
        name: value
        for name, value in config.items()
        if name not in DROPPED and not name.startswith("_")
    }
    return HubModel(size, keys, folder if has_weights else None, {CONFIG: settings})


def _read_processor(model: str, processor: Mapping[str, Any]) -> tuple[Size | None, dict[str, Any]]:
    """Input size and preprocessing of an image processor's config; without what it does not say, or says otherwise."""
    size, crop = (_sides(processor.get(name)) for name in ("size", "crop_size"))
    shortest = (
        (processor.get("size") or {}).get("shortest_edge")
        if isinstance(processor.get("size"), dict)
        else None
    )
    keys: dict[str, Any] = {}
    if processor.get("do_center_crop") and crop and (shortest or size):
        size, keys = (
            crop,
            {
                "resize": "center-crop",
                "crop_fraction": min(1.0, max(crop) / (shortest or min(size or crop))),
            },
        )
    elif shortest and "crop_pct" in processor:
        size = (shortest, shortest)
        keys = {"resize": "stretch"}
        if shortest < WARPED_FROM:
            keys = {"resize": "center-crop", "crop_fraction": float(processor["crop_pct"] or 1)}
    elif size:
        keys = {"resize": "stretch"}
    if processor.get("do_normalize", True):
        keys |= {
            name: tuple(processor[f"image_{name}"])
            for name in ("mean", "std")
            if processor.get(f"image_{name}")
        }
    else:
        keys |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    if not processor.get("do_rescale", True):
        keys["scale"] = 255
    _note_resampling(
        model,
        {0: "nearest", 1: "lanczos", 3: "bicubic"}.get(processor.get("resample", 2), "bilinear"),
    )
    return size, keys


def read_saved(folder: Path, module: nn.Module) -> dict[str, torch.Tensor] | None:
    """The state dict of a folder's classifier under today's names of transformers, which differ from those in the file.

    None where `module` is none of transformers', or the folder holds no safetensors. Raises InputError for a folder
    that transformers cannot read; no code of it is run.
    """
    is_own = any(base.__module__.startswith("transformers.") for base in type(module).__mro__)
    if (
        not is_own
        or not folder.is_dir()
        or not any((folder / name).exists() for name in WEIGHT_FILES[:2])
    ):
        return None
    transformers = _require("transformers", "hf", str(folder))
    transformers.utils.logging.disable_progress_bar()
    try:
        with built_on("cpu"):
            classifier = transformers.AutoModelForImageClassification.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, dtype="auto"
            )
    except Exception as error:  # a damaged folder can fail in any way
        text = " ".join(str(error).split())[:200]
        raise InputError(
            folder, f"cannot be read: {text}", "save it again with save_pretrained", "weights"
        ) from error
    return classifier.state_dict()


def _sides(size: Any) -> Size | None:
    """Height and width of a size as a processor writes it; None for another form."""
    if isinstance(size, int):
        return size, size
    if isinstance(size, dict) and {"height", "width"} <= size.keys():
        return int(size["height"]), int(size["width"])
    return None


def _note_resampling(model: str, method: str) -> None:
    if method != "bilinear":
        text = f"was trained on frames resized by '{method}'; they are resized bilinearly here"
        add_note(model, text, "its accuracy may differ a little from its authors'")
