"""torchvision's published weights by name: found, fetched once, verified, and one line when that cannot be."""

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

from gemel.models import zoo
from gemel.models.errors import InputError
from gemel.models.files.published import Published, fetch, find_published
from gemel.models.files.weights import load_weights
from gemel.models.notes import collect_notes
from gemel.models.workload import load_workload
from tests.models.queries import make_query

SQUEEZENET = "SqueezeNet1_1_Weights.IMAGENET1K_V1"


class QuietHandler(SimpleHTTPRequestHandler):
    """A file server without a log."""

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
    """A folder served by HTTP, and its address."""
    folder = tmp_path / "site"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def publish_at(monkeypatch: pytest.MonkeyPatch, url: str) -> Published:
    """Weights whose published address is `url`."""
    monkeypatch.setattr(torchvision.models.get_weight(SQUEEZENET).value, "url", url)
    return Published(SQUEEZENET)


def test_fetch_downloads_a_file_once(cache, site, monkeypatch) -> None:
    folder, address = site
    name = f"net-{hashlib.sha256(b'weights').hexdigest()[:8]}.pth"
    (folder / name).write_bytes(b"weights")
    published = publish_at(monkeypatch, f"{address}/{name}")
    assert fetch(published) == cache / name
    (folder / name).unlink()
    assert fetch(published).read_bytes() == b"weights"


def test_fetch_refuses_a_download_of_another_hash_and_leaves_nothing(cache, site, monkeypatch) -> None:
    folder, address = site
    (folder / "net-01234567.pth").write_bytes(b"something else")
    with pytest.raises(InputError) as caught:
        fetch(publish_at(monkeypatch, f"{address}/net-01234567.pth"), "weights (gate)")
    assert str(caught.value) == (
        f"torchvision:{SQUEEZENET}: weights (gate): the download is damaged: its hash is another; try again"
    )
    assert list(cache.iterdir()) == []


def test_fetch_without_the_file_on_the_server_names_the_cache(cache, site, monkeypatch) -> None:
    with pytest.raises(InputError, match=r"cannot be downloaded \(File not found\); try again with a network, or put"):
        fetch(publish_at(monkeypatch, f"{site[1]}/net-01234567.pth"))


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
def test_find_published_accepts_the_models_own_and_full_names(text: str, model: str, name: str) -> None:
    with collect_notes() as notes:
        assert find_published(text, model, "w.yaml", "weights") == Published(name)
    chosen = f"w.yaml: weights: {text} is {name} in this release of torchvision; name it in full to keep it"
    assert notes == ([chosen] if "DEFAULT" in text else [])


@pytest.mark.parametrize(
    ("text", "model", "problem"),
    [
        ("torchvision:IMAGENET1K_V3", "resnet50", "no weights 'IMAGENET1K_V3' of resnet50; did you mean IMAGENET1K_V"),
        ("torchvision:COCO", "resnet18", "no weights 'COCO' of resnet18; there are IMAGENET1K_V1, DEFAULT"),
        ("torchvision:DEFAULT", "ssd_resnet18", "publishes no weights of ssd_resnet18; give a file, or the full name"),
        ("torchvision:DEFAULT", "mine:make", "publishes no weights of mine:make; give a file"),
        ("torchvision:ResNet19_Weights.DEFAULT", "resnet18", "no 'ResNet19_Weights.DEFAULT'; give a full name"),
        ("torchvision:ResNet18_Weights.V9", "resnet18", "publishes no 'ResNet18_Weights.V9'; give a full name"),
    ],
)
@pytest.mark.parametrize("key", ["weights", "init"])
def test_load_workload_refuses_unknown_published_weights(tmp_path, key: str, text: str, model: str, problem) -> None:
    task = "detection" if model.startswith("ssd") else "classification"
    query = {"id": "gate", "camera": "c", "task": task, "classes": ["car", "none"], "model": model, "input_size": 64}
    path = tmp_path / "w.yaml"
    document = {"name": "w", "cameras": {"c": {"source": "c.mp4"}}, "queries": [{**query, key: text}]}
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(InputError) as caught:
        load_workload(path)
    assert str(caught.value).startswith(f"{path}: queries[0].{key} (gate): torchvision publishes no")
    assert problem in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "heads"),
    [
        ("googlenet", ("aux1.fc1.weight", "aux2.conv.bn.num_batches_tracked")),
        pytest.param("inception_v3", ("AuxLogits.fc.bias",), marks=pytest.mark.exhaustive),
    ],
)
def test_load_weights_leaves_out_auxiliary_heads(cache, model: str, heads: tuple[str, ...]) -> None:
    trained = zoo.build(model, 1000, {}, 80).state_dict()
    published = find_published("torchvision:DEFAULT", model, "", "")
    cache.mkdir(parents=True)
    torch.save({**trained, **{head: torch.zeros(1) for head in heads}}, cache / published.file_name)
    query = make_query(model=model, input_size=80, weights=published, classes=tuple(f"class{i}" for i in range(1000)))
    loaded = load_weights(query, zoo.build_query(query)).state_dict()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in loaded.items())
