"""The code in docs/bundle.md does what it says."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from gemel.models import zoo
from gemel.models.bundle import open_bundle, verify_bundle
from gemel.models.quantization import choices, pack


@pytest.mark.parametrize("weights", ["fp32", "fp16", "int8", "int4"])
def test_bundle_opens_with_safetensors_and_torchvision_alone(tmp_path, repository, sample, writer, weights):
    original = zoo.build("mobilenet_v3_small", ("car", "none")).eval()
    path = tmp_path / "one.safetensors"
    record = replace(sample.queries[0], model="mobilenet_v3_small")
    stored = {key: pack(tensor, own[0]) for key, tensor in original.state_dict().items()
              if weights != "fp32" and (own := choices(key, tensor.shape, weights))}  # fmt: skip
    assert bool(stored) == (weights != "fp32")
    manifest = writer(path, {"north": original}, [record], packed={"north": stored})
    assert manifest.bytes.before == sum(tensor.nbytes for tensor in original.state_dict().values())
    assert verify_bundle(path) == []
    original.load_state_dict({key: one.wide() for key, one in stored.items()}, strict=False)

    page = (repository / "docs" / "bundle.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(code) == 1
    names: dict[str, Any] = {"path": path}
    exec(code[0], names)
    frames = torch.randn(1, 3, 64, 64)
    theirs = names["model"].eval()(frames)
    torch.testing.assert_close(theirs, original(frames), atol=1e-4, rtol=1e-4)
    assert torch.equal(open_bundle(path).build("north")(frames), original(frames))
