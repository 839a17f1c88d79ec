"""What is imported, and what is not: torch's compiler takes longer than everything else together."""

import subprocess
import sys
from pathlib import Path

import torch

from models import zoo

ROOT = Path(__file__).resolve().parents[2]
COMPILER = ("torch._dynamo", "sympy")


def loaded_after(script: str, *names: str) -> list[str]:
    """Which of these modules a fresh interpreter has imported after a script."""
    said = f"import sys\n{script}\nprint([name for name in {names!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", said], cwd=ROOT, capture_output=True, text=True, check=True)
    return eval(done.stdout.splitlines()[-1])


def test_the_zoo_and_its_architectures_need_no_compiler():
    script = (
        "import torch\nfrom models import zoo\nfrom models.frames.preprocess import Preprocess\nimport numpy\n"
        "for name in ('resnet18', 'mobilenet_v3_small'): zoo.build(name, ('a', 'b'), device='meta')\n"
        "Preprocess(16).resize(numpy.zeros((20, 30, 3), numpy.uint8))"
    )
    assert loaded_after(script, *COMPILER) == []


def test_torchvision_gets_its_answer_from_the_compiler_when_it_asks():
    script = (
        "import torch\nfrom models.vision import torchvision\n"
        "assert torchvision.ops.roi_align(torch.ones(1, 1, 8, 8), [torch.zeros(1, 4)], 2).shape[-1] == 2\n"
        "from torchvision.ops import roi_align\nimport importlib\n"
        "own = importlib.import_module('torchvision.ops.roi_align')\n"
        "import torch._dynamo.utils as real\n"
        "assert own.is_compile_supported is not real.is_compile_supported\n"
        "assert own.is_compile_supported('cpu') == real.is_compile_supported('cpu')"
    )
    assert loaded_after(script, "torch._dynamo.utils") == ["torch._dynamo.utils"]


def test_an_architecture_on_meta_is_the_one_that_is_built_with_weights():
    for name in ("mobilenet_v3_small", "ssd_resnet18", "cifar_resnet20"):
        entry = zoo.ENTRIES[name]
        meta, real = (
            zoo.build(name, ("a", "b"), {}, entry.input_size, entry.task, device).state_dict()
            for device in ("meta", "cpu")
        )
        assert {key: (value.shape, value.dtype) for key, value in meta.items()} == {
            key: (value.shape, value.dtype) for key, value in real.items()
        }
        assert all(value.is_meta for value in meta.values())
        weights = [value for value in real.values() if value.ndim == 4]
        assert all(bool(weight.abs().sum() > 0) for weight in weights), "on the CPU weights are drawn"


def test_weights_are_drawn_as_without_the_zoo():
    torch.manual_seed(0)
    ours = zoo.build("resnet18", ("a", "b"), device="cpu").state_dict()
    torch.manual_seed(0)
    from torchvision.models import resnet18

    theirs = resnet18(num_classes=2).state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
