"""GoogLeNet and Inception v3 without the auxiliary heads, which only their training needed.

Their published weights expect frames scaled to -1..1, which torchvision hides behind `transform_input`. Here the zoo
says so instead, and the networks change no input themselves.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from models.zoo.classifiers.torchvision_nets import build_classifier, register_classifier

HALF = (0.5, 0.5, 0.5)
AUXILIARY = {"googlenet": ("aux1.", "aux2."), "inception_v3": ("AuxLogits.",)}


def _build(name: str, num_classes: int, input_size: int, **model_args: Any) -> nn.Module:
    # init_weights states torchvision's own default, which it warns about when left open.
    return build_classifier(name, num_classes, input_size, aux_logits=False, init_weights=True, **model_args)


for _name, _auxiliary in AUXILIARY.items():
    register_classifier(_name, partial(_build, _name), scaling=(HALF, HALF), auxiliary=_auxiliary)
