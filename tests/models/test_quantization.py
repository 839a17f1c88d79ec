"""Packing and widening: no weight moves by more than half a scale, whatever the weights are."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gemel.models.bits import BIT_WIDTHS, max_code
from gemel.models.quantization import choices, pack

magnitudes = st.sampled_from([0.0, 1e-42, 1e-20, 1e-3, 1.0, 300.0, 1e20, 3e38])


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """Weights of 1 to 4 dimensions with channels of very different magnitudes."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    seed = draw(st.integers(0, 2**32))
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    scales = torch.tensor([draw(magnitudes) for _ in range(shape[0])])
    return drawn * scales.view(-1, *(1,) * (len(shape) - 1))


@given(weights())
def test_int8_moves_weights_by_at_most_half_a_scale(weight: Tensor) -> None:
    one = pack(weight, "int8")
    assert one.width == "int8" and one.tensor.dtype == torch.int8 and one.tensor.shape == weight.shape
    assert one.scale is not None and one.scale.shape == weight.shape[:1] and bool((one.scale > 0).all())
    moved = (one.wide() - weight).reshape(len(weight), -1).abs().double()
    assert bool((moved <= 0.5 * one.scale.double()[:, None] * (1 + 1e-4)).all())
    assert int(one.tensor.abs().max()) <= 127


@given(weights())
def test_int4_is_read_with_numpy_and_beats_plain_rounding(weight: Tensor) -> None:
    one, bits, most = pack(weight, "int4"), BIT_WIDTHS["int4"], max_code("int4")
    count = weight[0].numel()
    assert one.scale is not None and bool((one.scale > 0).all())
    assert one.tensor.dtype == torch.uint8 and one.tensor.shape == (len(weight), -(-bits * count // 8))
    unpacked = np.unpackbits(one.tensor.numpy(), axis=1, count=bits * count, bitorder="little")
    codes = unpacked.reshape(len(weight), count, bits) @ (1 << np.arange(bits)) - most
    assert np.abs(codes).max() <= most
    by_hand = torch.from_numpy(codes).float() * one.scale[:, None]
    assert torch.equal(one.wide(), by_hand.view(weight.shape))
    rows = weight.reshape(len(weight), -1).double()
    largest = rows.abs().amax(1, keepdim=True).clamp(min=1e-37)
    plain = (rows * most / largest).round() * largest / most
    errors = [((found - rows) / largest).square().sum(1) for found in (by_hand.double(), plain)]
    assert bool((errors[0] <= errors[1] * (1 + 1e-3) + 1e-9).all())


def test_fp16_keeps_eleven_bits_and_has_no_scale() -> None:
    weight = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    one = pack(weight, "fp16")
    assert (one.width, one.scale) == ("fp16", None)
    assert torch.equal(one.wide(), weight.half().float())
    assert bool(((one.wide() - weight).abs() <= weight.abs() * 2**-11 + 2**-25).all())


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        *((value, width) for value in (float("nan"), float("inf")) for width in ("int8", "int4")),
        *((float("nan"), "fp16"), (1e6, "fp16")),
    ],
)
def test_pack_of_invalid_weights_is_refused(value: float, dtype: str) -> None:
    with pytest.raises(ValueError, match="not finite, or too large"):
        pack(torch.tensor([[1.0, value]]), dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "shape", "head", "expected"),
    [
        ("layer1.0.conv1.weight", (64, 64, 3, 3), False, ("int8", "fp16")),
        ("encoder.self_attention.in_proj_weight", (192, 64), False, ("int8", "fp16")),
        ("features.1.conv.0.weight", (512, 1, 3, 3), False, ("int8", "fp16")),
        ("features.1.conv.0.weight", (2048, 1, 2, 2), False, ("fp16",)),
        ("fc.weight", (1000, 512), True, ("fp16",)),
        ("fc.weight", (2, 16), False, ()),
        ("bn1.weight", (2048,), False, ()),
        ("bn1.running_var", (2048,), False, ()),
        ("encoder.pos_embedding", (1, 197, 768), False, ()),
        ("fc.bias", (4096,), False, ()),
    ],
)
def test_choices_by_kind_and_size(key, shape, head, expected) -> None:
    assert choices(key, shape, "int8", head) == expected
    assert choices(key, shape, "fp16", head) == expected[-1:]
    has_long_rows = "int8" in expected and math.prod(shape[1:]) >= 16
    assert choices(key, shape, "int4", head) == (("int4", *expected) if has_long_rows else expected)
