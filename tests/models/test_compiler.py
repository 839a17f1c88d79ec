"""What is imported, and what is not: torch's compiler takes longer than everything else together."""

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models import zoo
from models.bundle import BundleQuery, Made, write_bundle
from models.bundle.format import encode_header, parse_header, tensor_name
from models.quantization import pack
from models.workload import Query
from tests.exhaustive import one_in

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "torchvision", "cv2", "onnx", "scipy", "matplotlib")
COMPILER = ("torch._dynamo", "torch._dynamo.utils", "torch._inductor")


def printed(script: str) -> str:
    """What a fresh interpreter prints for a script."""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_after(script: str, *names: str) -> list[str]:
    """Which of these modules a fresh interpreter has imported after a script."""
    said = f"import sys\n{script}\nprint([name for name in {names!r} if name in sys.modules])"
    return ast.literal_eval(printed(said).splitlines()[-1])


def test_the_zoo_and_its_architectures_need_no_compiler():
    script = (
        "import torch\nfrom models import zoo\nfrom models.preprocess import Preprocess\nimport numpy\n"
        "for name in ('resnet18', 'mobilenet_v3_small'): zoo.build(name, ('a', 'b'), device='meta')\n"
        "Preprocess(16).resize(numpy.zeros((20, 30, 3), numpy.uint8))"
    )
    assert loaded_after(script, *COMPILER) == []


def test_torchvision_gets_its_answer_from_the_compiler_when_it_asks():
    script = (
        "import torch\nfrom models.device import torchvision\n"
        "assert torchvision.ops.roi_align(torch.ones(1, 1, 8, 8), [torch.zeros(1, 4)], 2).shape[-1] == 2\n"
        "from torchvision.ops import roi_align\nimport importlib\n"
        "own = importlib.import_module('torchvision.ops.roi_align')\n"
        "import torch._dynamo.utils as real\n"
        "assert own.is_compile_supported is not real.is_compile_supported\n"
        "assert own.is_compile_supported('cpu') == real.is_compile_supported('cpu')"
    )
    assert loaded_after(script, "torch._dynamo.utils") == ["torch._dynamo.utils"]


@pytest.mark.exhaustive
def test_operations_are_counted_without_it_and_to_the_same_numbers():
    count = (
        "from models import zoo\nfrom models.cost import flops, workspace_bytes\n"
        "for name in ('mobilenet_v3_small', 'ssdlite320_mobilenet_v3_large'):\n"
        "    model = zoo.build(name, ('a', 'b'), {}, 320, zoo.ENTRIES[name].task, 'meta')\n"
        "    print(flops(model, 320), workspace_bytes(model, 320))"
    )
    assert loaded_after(count, *COMPILER) == []
    plain, with_it = (printed(script) for script in (count, f"import torch._dynamo\n{count}"))
    assert plain == with_it and len(plain.splitlines()) == 2


def test_the_compiler_is_there_for_who_wants_it_and_nothing_stays_left_out_for_good():
    script = (
        "import torch, types\nfrom models import zoo\nfrom models.process import MARK, without_compiler\n"
        "from models.cost import flops\n"
        "flops(zoo.build('mobilenet_v3_small', ('a', 'b'), device='meta'), 64)\n"
        "with without_compiler():\n"
        "    import torch._dynamo as stand_in\n"
        "    assert not hasattr(stand_in, '__file__')\n"
        "    assert stand_in.config.__name__ == 'torch._dynamo.config'\n"
        "    import torch._dynamo.utils as utils\n"
        "assert torch._dynamo.__file__ and utils.__file__ and torch._dynamo.utils is utils\n"
        "from torch._prims_common import wrappers\n"
        "left = [fn for fn in vars(torch._refs).values() if MARK in getattr(fn, '__dict__', {})]\n"
        "assert not left, left"
    )
    assert loaded_after(script, "torch._dynamo") == ["torch._dynamo"]


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    """A classifier, a detector and a packed weight, in a cache where nothing is remembered yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    common = {
        "camera": "gate", "classes": ("x", "y"), "weights": None, "init": None, "fps": 5.0, "sla_ms": 1000.0,
        "roi": None, "min_score": 0.0, "priority": 1, "data": None, "accuracy_target": 0.95,
    }  # fmt: skip
    queries: list[Any] = [
        Query(id="a", task="classification", model="resnet18", model_args={}, input_size=64, **common),
        Query(
            id="b", task="detection", model="ssd_resnet18", model_args={"aspect_ratios": []}, input_size=96, **common
        ),
    ]
    models = {query.id: zoo.build_query(query) for query in queries}
    stored = {"a": {"layer1.0.conv1.weight": pack(models["a"].get_parameter("layer1.0.conv1.weight"), "int8")}}
    path = tmp_path / "b.safetensors"
    write_bundle(path, models, list(map(BundleQuery.of, queries)), Made("one", "none", 0), packed=stored)
    return path


def run(*words):
    """A script that runs one command, which must come out well."""
    return f"from gemel.cli import main\nassert main({[*map(str, words)]!r}) == 0"


def test_a_bundle_is_shown_without_torch(bundle):
    assert loaded_after(run("bundle", "show", bundle), *HEAVY) == []


@pytest.mark.parametrize(
    "words", one_in(2, [["bundle", "verify"], ["plan"], ["plan", "--device", "all"], ["simulate"]])
)
def test_whatever_was_worked_out_before_needs_no_torch_again(bundle, words):
    first = loaded_after(run(*words, bundle), *COMPILER, *HEAVY)
    assert "torch" in first and not {*first} & {*COMPILER, "cv2", "onnx", "scipy", "torchvision.transforms.v2"}
    assert loaded_after(run(*words, bundle), *HEAVY) == []


@pytest.mark.exhaustive
def test_what_is_remembered_changes_no_answer(bundle):
    for words in (["bundle", "verify", bundle], ["plan", bundle, "--json"], ["plan", bundle, "--memory", "50%"]):
        assert printed(run(*words)) == printed(run(*words))


def test_verify_finds_what_does_not_fit_an_architecture_that_it_remembers(bundle):
    printed(run("bundle", "verify", bundle))
    shape(bundle, "a", "fc.weight", (512, 2))
    said = "from gemel.cli import main\n" + f"main(['bundle', 'verify', {str(bundle)!r}])"
    assert loaded_after(said, "torch") == [] and "a: fc.weight has shape (512, 2)" in printed(said)
    said = said.replace("'bundle', 'verify'", "'plan'")
    assert loaded_after(said, "torch") == []


def shape(path, query_id, key, wanted):
    """Say of a query's tensor that it has another shape, and seal the bundle again."""
    content = path.read_bytes()
    header = parse_header(content)
    manifest = json.loads(header.metadata["gemel.manifest"])
    query = next(one for one in manifest["queries"] if one["id"] == query_id)
    entries = header.entries
    entry = entries.pop(query["tensors"][key])
    data = content[header.data_start + entry.begin : header.data_start + entry.end]
    name = query["tensors"][key] = tensor_name(entry.dtype, wanted, data)
    entries[name] = replace(entry, name=name, shape=wanted)
    ordered = sorted(entries.values(), key=lambda one: one.begin)
    head = encode_header(ordered, {"gemel.manifest": json.dumps(manifest, separators=(",", ":"))})
    path.write_bytes(head + content[header.data_start :])


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
