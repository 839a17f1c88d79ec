"""torchvision's published weights by name: found, fetched once, checked, and one line when that cannot be."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import torchvision
import yaml
from torch import Tensor

from models import zoo
from models.errors import InputError
from models.published import Published, fetch, find_published
from models.weights import load_weights
from models.workload import Query, load_workload

SQUEEZENET = "SqueezeNet1_1_Weights.IMAGENET1K_V1"


class Quiet(SimpleHTTPRequestHandler):
    """A file server that says nothing."""

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """An empty cache of torch's own."""
    before = torch.hub.get_dir()
    torch.hub.set_dir(str(tmp_path / "hub"))
    yield tmp_path / "hub" / "checkpoints"
    torch.hub.set_dir(before)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder that a web server on this machine shows, and its address."""
    folder = tmp_path / "site"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def published_at(monkeypatch: pytest.MonkeyPatch, url: str, name: str = SQUEEZENET) -> Published:
    """Weights whose published address is another."""
    monkeypatch.setattr(torchvision.models.get_weight(name).value, "url", url)
    return Published(name)


def put(cache: Path, name: str, state: dict[str, Tensor]) -> Published:
    """Weights that were fetched earlier."""
    cache.mkdir(parents=True, exist_ok=True)
    torch.save(state, cache / Published(name).file_name)
    return Published(name)


def ask(model: str, input_size: int, weights: Published, classes: int = 1000, task: str = "classification") -> Query:
    """A query with published weights."""
    return Query(
        id="gate", camera="c", task=task, classes=tuple(f"class{i}" for i in range(classes)), model=model,
        model_args={}, input_size=input_size, weights=weights, init=None, fps=None, sla_ms=100.0, roi=None,
        min_score=0.0, priority=1, data=None, accuracy_target=0.95,
    )  # fmt: skip


def test_a_file_is_downloaded_once_and_its_hash_checked(cache, site, monkeypatch) -> None:
    folder, address = site
    content = b"weights"
    name = f"net-{hashlib.sha256(content).hexdigest()[:8]}.pth"
    (folder / name).write_bytes(content)
    published = published_at(monkeypatch, f"{address}/{name}")
    assert fetch(published) == cache / name
    (folder / name).unlink()
    assert fetch(published).read_bytes() == content


def test_a_download_of_another_hash_is_refused_and_leaves_nothing(cache, site, monkeypatch) -> None:
    folder, address = site
    (folder / "net-01234567.pth").write_bytes(b"something else")
    with pytest.raises(InputError) as caught:
        fetch(published_at(monkeypatch, f"{address}/net-01234567.pth"), "weights (gate)")
    assert str(caught.value) == (
        f"torchvision:{SQUEEZENET}: weights (gate): the download is damaged: its hash is another; try again"
    )
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "model", "name"),
    [
        ("torchvision:IMAGENET1K_V2", "resnet50", "ResNet50_Weights.IMAGENET1K_V2"),
        ("torchvision:DEFAULT", "resnet50", "ResNet50_Weights.IMAGENET1K_V2"),
        ("torchvision:COCO_V1", "ssd300_vgg16", "SSD300_VGG16_Weights.COCO_V1"),
        ("torchvision:ResNet18_Weights.DEFAULT", "ssd_resnet18", "ResNet18_Weights.IMAGENET1K_V1"),
        ("torchvision:ResNet18_Weights.IMAGENET1K_V1", "mine:make", "ResNet18_Weights.IMAGENET1K_V1"),
    ],
)
def test_names_are_the_models_own_or_full_ones(text: str, model: str, name: str) -> None:
    assert find_published(text, model, "w.yaml", "weights") == Published(name)


@pytest.mark.parametrize(
    ("text", "model", "fault"),
    [
        ("torchvision:IMAGENET1K_V3", "resnet50", "no weights 'IMAGENET1K_V3' of resnet50; did you mean IMAGENET1K_V"),
        ("torchvision:COCO", "resnet18", "no weights 'COCO' of resnet18; there are IMAGENET1K_V1, DEFAULT"),
        ("torchvision:", "resnet18", "no weights '' of resnet18; there are IMAGENET1K_V1"),
        ("torchvision:DEFAULT", "ssd_resnet18", "publishes no weights of ssd_resnet18; give a file, or the full name"),
        ("torchvision:DEFAULT", "mine:make", "publishes no weights of mine:make; give a file"),
        ("torchvision:ResNet19_Weights.DEFAULT", "resnet18", "no 'ResNet19_Weights.DEFAULT'; give a full name"),
        ("torchvision:ResNet18_Weights.V9", "resnet18", "publishes no 'ResNet18_Weights.V9'; give a full name"),
    ],
)
def test_an_unknown_name_is_one_line_when_the_workload_is_read(tmp_path, text: str, model: str, fault: str) -> None:
    task = "detection" if model.startswith("ssd") else "classification"
    query = {"id": "gate", "camera": "c", "task": task, "classes": ["car", "none"], "model": model, "input_size": 64}
    path = tmp_path / "w.yaml"
    for key in ("weights", "init"):
        document = {"name": "w", "cameras": {"c": {"source": "c.mp4"}}, "queries": [{**query, key: text}]}
        path.write_text(yaml.safe_dump(document))
        with pytest.raises(InputError) as caught:
            load_workload(path)
        assert str(caught.value).startswith(f"{path}: queries[0].{key} (gate): torchvision publishes no")
        assert fault in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "heads"),
    [("googlenet", ("aux1.fc1.weight", "aux2.conv.bn.num_batches_tracked")), ("inception_v3", ("AuxLogits.fc.bias",))],
)
def test_auxiliary_heads_of_published_weights_are_left_out(cache, model: str, heads: tuple[str, ...]) -> None:
    trained = zoo.build(model, 1000, {}, 80).state_dict()
    name = str(find_published("torchvision:DEFAULT", model, "", "")).removeprefix("torchvision:")
    query = ask(model, 80, put(cache, name, {**trained, **{head: torch.zeros(1) for head in heads}}))
    loaded = load_weights(query, zoo.build_query(query)).state_dict()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in loaded.items())
