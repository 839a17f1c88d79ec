"""Vision transformers: ViT-B/16 (Dosovitskiy et al. 2021) and Swin-T (Liu et al. 2021), torchvision's."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from models.zoo.classifiers.torchvision_nets import build_classifier, register_classifier

PATCH = 16


def vit_b_16(num_classes: int, input_size: int, **model_args: Any) -> nn.Module:
    """ViT-B/16; its position embedding is made for one input size, a multiple of 16 pixels (else ValueError)."""
    if input_size % PATCH:
        near = max(PATCH, round(input_size / PATCH) * PATCH)
        raise ValueError(f"input_size {input_size} is no multiple of {PATCH}, as its patches need; {near} is")
    return build_classifier("vit_b_16", num_classes, input_size, image_size=input_size, **model_args)


register_classifier("vit_b_16", vit_b_16)
register_classifier("swin_t", partial(build_classifier, "swin_t"))
