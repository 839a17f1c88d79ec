"""Published weights, loaded as a query loads them, on real images: the answers have to make sense."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.ops import batched_nms, box_iou

from models import zoo
from models.errors import InputError
from models.tasks import task_of
from models.weights import load_matching, load_weights, read_state
from models.workload import Query

pytestmark = pytest.mark.real

CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_FILES = {
    20: ("cifar_resnet20-12fca82f.th", 0.810), 32: ("cifar_resnet32-d509ac18.th", 0.829),
    44: ("cifar_resnet44-014dd654.th", 0.826), 56: ("cifar_resnet56-4bfd9763.th", 0.830),
}  # fmt: skip
"""Accuracy as measured with these weights on all 5,000 test images of the pack."""
CIFAR_IMAGES = 200

IMAGENET = {
    "mobilenet_v2": "mobilenet_v2_from_coral_ptq.pth",
    "squeezenet1_0": "squeezenet1_0_from_deepcompression.pth",
}
ROAD_VEHICLES = (
    407, 436, 468, 511, 555, 569, 573, 575, 609, 627, 654, 656, 661, 665,
    670, 675, 705, 717, 734, 751, 757, 779, 817, 829, 864, 867, 874,
)  # fmt: skip
"""ImageNet's classes from ambulance, beach wagon and cab to trailer truck and trolleybus."""

COCO_VEHICLES = (2, 3, 5, 7)
"""COCO's car, motorcycle, bus and truck among its 80 classes."""
CLIPS = (
    "videos/tfl_03601/2019-06-28_03601.mp4",
    "videos/tfl_03604/2019-06-29_03604.mp4",
    "videos/tfl_06514/2019-06-28_06514.mp4",
)


@pytest.mark.parametrize("depth", CIFAR_FILES)
def test_cifar_resnets_name_the_images(real_data: Path, depth: int):
    """The images are JPEGs of quality 75 with halved colour, which costs networks trained on clean images about ten
    points: once more through the same compression, on a shifted grid, costs eight again. On clean images the authors
    report 91.7 % for 20 layers and 93.4 % for 56.

    The bar lies four binomial deviations below what all 5,000 images give.
    """
    file, measured = CIFAR_FILES[depth]
    model = loaded(f"cifar_resnet{depth}", real_data / "models" / file, CIFAR, 32)
    frames, labels = cifar_images(real_data)
    answers = outputs(model, f"cifar_resnet{depth}", frames, 32).argmax(dim=1)
    spread = 4 * (measured * (1 - measured) / CIFAR_IMAGES) ** 0.5
    assert (answers == torch.tensor(labels)).float().mean() > measured - spread


@pytest.mark.parametrize("name", IMAGENET)
def test_imagenet_classifiers_see_vehicles_where_there_are_some(real_data: Path, name: str):
    """Of 23 vehicles cut out of the traffic frames both find a road vehicle among their best five in more than half;
    of frames of a street seen from the side nearly always first; of a corridor never.
    """
    classes = tuple(str(index) for index in range(1000))
    model = loaded(name, real_data / "models" / IMAGENET[name], classes, 224)

    def vehicles(frames: list[np.ndarray], best: int) -> float:
        answers = outputs(model, name, frames, 224).topk(best).indices
        return torch.isin(answers, torch.tensor(ROAD_VEHICLES)).any(dim=1).float().mean().item()

    street = frames_of(real_data / "videos/pinto_street3/testvideo3.mp4", step=30)
    corridor = frames_of(real_data / "videos/intel_person/one-by-one-person-detection.mp4", step=50)
    assert vehicles(street, best=1) >= 0.8
    assert vehicles(corridor, best=5) == 0
    assert vehicles(vehicle_crops(real_data), best=5) >= 0.4


def test_fastestdet_finds_vehicles_on_the_traffic_cameras(real_data: Path):
    """At a score of 0.3 and 20 pixels of height on, three cameras together: recall 0.45, precision 0.76.

    With the channels the other way round recall is 0.22.
    """
    classes = tuple(f"class{index}" for index in range(80))
    model = loaded("fastestdet", real_data / "models" / "FastestDet_280-epoch.pth", classes, 352, task="detection")
    found = objects = right = answers = 0
    for clip in CLIPS:
        frames = frames_of(real_data / clip, step=40)
        truths = human_boxes(real_data / clip)
        answered = task_of("detection").predictions(
            model, outputs(model, "fastestdet", frames, 352), [(352, 288)] * len(frames), classes, 0.3
        )
        for index, answer in enumerate(answered):
            boxes = vehicles_of(answer)
            truth = torch.tensor([row["box"] for row in truths if row["frame"] == 40 * index])
            overlap = box_iou(boxes, truth) >= 0.5
            large = truth[:, 3] - truth[:, 1] >= 20
            objects += int(large.sum())
            found += int(overlap.any(dim=0)[large].sum())
            answers += len(boxes)
            right += int(overlap.any(dim=1).sum())
    assert objects > 200
    assert found / objects > 0.35
    assert right / answers > 0.6


def test_the_shufflenet_backbone_starts_fastestdet_and_no_other_layout(real_data: Path):
    """It has Megvii's layout, whose channels lie in another order than torchvision's."""
    path = real_data / "models" / "shufflenetv2_x05_backbone.pth"
    model = zoo.build("fastestdet", ("vehicle",), {}, 352, "detection")
    assert set(load_matching(model, path)) == {f"backbone.{name}" for name in read_state(path)}
    with pytest.raises(InputError, match=r"none of its .* tensors fits ShuffleNetV2 by name and shape"):
        load_matching(zoo.build("shufflenet_v2_x0_5", ("vehicle", "none")), path)


def loaded(name: str, weights: Path, classes: tuple[str, ...], size: int, task: str = "classification") -> nn.Module:
    """The model of a query with these weights, in eval mode."""
    query = Query(
        id="gate", camera="bridge", task=task, classes=classes, model=name, model_args={}, input_size=size,
        weights=weights, init=None, fps=None, sla_ms=100.0, roi=None, min_score=0.0, priority=1, data=None,
        accuracy_target=0.95,
    )  # fmt: skip
    return load_weights(query, zoo.build(name, classes, {}, size, task)).eval()


def outputs(model: nn.Module, name: str, frames: Sequence[np.ndarray], size: int) -> Any:
    """What the model makes of RGB frames of any size, prepared as the zoo says."""
    preprocess = zoo.preprocess_of(name, size)
    with torch.inference_mode():
        return model(preprocess.normalise(torch.stack([preprocess.resize(frame) for frame in frames])))


def cifar_images(folder: Path) -> tuple[list[np.ndarray], list[int]]:
    """The first test images of every class, and their classes."""
    frames, labels = [], []
    with tarfile.open(folder / "datasets" / "cifar10_jpeg_pack.tar") as pack:
        for label, name in enumerate(CIFAR):
            for index in range(CIFAR_IMAGES // len(CIFAR)):
                file = pack.extractfile(f"test/{name}/{index:04d}.jpg")
                assert file is not None
                image = cv2.imdecode(np.frombuffer(file.read(), np.uint8), cv2.IMREAD_COLOR)
                assert image is not None
                frames.append(cv2.cvtColor(image, cv2.COLOR_BGR2RGB))
                labels.append(label)
    return frames, labels


def frames_of(clip: Path, step: int, first: int = 300) -> list[np.ndarray]:
    """Every `step`-th of a clip's first frames, RGB."""
    video, frames = cv2.VideoCapture(str(clip)), []
    for index in range(first):
        _, frame = video.read()
        if frame is not None and index % step == 0:
            frames.append(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB))
    assert frames, f"{clip} cannot be read"
    return frames


def human_boxes(clip: Path) -> list[dict[str, Any]]:
    """The rows beside a clip: frame, track, class, box in pixels."""
    return [json.loads(line) for line in Path(f"{clip}.gt.jsonl").read_text().splitlines()]


def vehicle_crops(folder: Path) -> list[np.ndarray]:
    """The largest view of every car, bus and truck of 50 pixels or more that lies wholly in the frame."""
    crops = []
    for clip in CLIPS:
        frames = frames_of(folder / clip, step=10)
        height, width = frames[0].shape[:2]
        largest: dict[int, tuple[float, np.ndarray]] = {}
        for row in human_boxes(folder / clip):
            x0, y0, x1, y1 = map(int, row["box"])
            whole = x0 > 2 and y0 > 2 and x1 < width - 2 and y1 < height - 2
            if row["frame"] % 10 or not whole or min(x1 - x0, y1 - y0) < 50 or row["class"] == "motorbike":
                continue
            area, around_x, around_y = (x1 - x0) * (y1 - y0), (x1 - x0) // 8, (y1 - y0) // 8
            if area > largest.get(row["track"], (0.0, None))[0]:
                view = frames[row["frame"] // 10]
                crop = view[max(0, y0 - around_y) : y1 + around_y, max(0, x0 - around_x) : x1 + around_x]
                largest[row["track"]] = (area, crop)
        crops += [crop for _, crop in largest.values()]
    assert len(crops) > 20
    return crops


def vehicles_of(answer: Any) -> Tensor:
    """The boxes (K, 4) of all kinds of vehicles in one answer, each vehicle once whatever it was called."""
    names = {f"class{index}" for index in COCO_VEHICLES}
    kept = [index for index, name in enumerate(answer.classes) if name in names]
    boxes = torch.tensor([answer.boxes[index] for index in kept]).reshape(-1, 4)
    scores = torch.tensor([answer.scores[index] for index in kept])
    return boxes[batched_nms(boxes, scores, torch.zeros(len(kept)), 0.45)]
