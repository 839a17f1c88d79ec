"""The files that are compared: ONNX models, a folder of frames for each, and the frames as the models take them.

    python -m benchmarks.compare.files [WORKLOAD ...] [--out out/compare]

`detectors`: a YOLOX-nano for each of twelve clips, fine-tuned from the published file on boxes of a machine teacher.
`classifiers`: a ResNet-50 for each of four views of the GTI database, fine-tuned from one that saw all of them.
`unlike`: six networks that have nothing in common. All are written by `gemel train` or as they were published; each
stage is skipped where its result is there. Needs the footage of `benchmarks.data`, and torch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.data import gti, splits
from benchmarks.data.files import CocoSplit, copy_whole, data_folder, frames_of, need, once, rows_of, say
from benchmarks.data.junction import boxes_by_frame
from benchmarks.data.london import INIT
from gemel.models.decoders.files import GEMEL_PREPROCESS, ModelFile
from gemel.models.files.pictures import read_picture
from gemel.models.preprocess import Preprocess

REPOSITORY = Path(__file__).resolve().parents[2]
DETECTORS, CLASSIFIERS, UNLIKE = "detectors", "classifiers", "unlike"
WORKLOADS = (DETECTORS, CLASSIFIERS, UNLIKE)
CLIPS = {
    "blackfriars": "tfl_03601/2019-06-28_03601", "elephant": "tfl_03604/2019-06-29_03604",
    "hyde-park": "tfl_06514/2019-06-28_06514", "earls-court": "tfl_jc1/jc1", "old-oak": "tfl_jc2/jc2",
    "jc4": "tfl_jc4/jc4", "jc7": "tfl_jc7/jc7", "parking": "intel_car/car-detection",
    "woolwich": "tfl_a13_625/625_201708311636", "ozlu": "ozlu_street/input_video",
    "pinto": "pinto_street3/testvideo3", "dashcam": "carnd_dash/test_video",
}  # fmt: skip
FRAMES = 120
"""Of each clip that has more, spread over it."""
GAP = 2
FRAMES_SHOWN = 48
"""Frames on which answers are compared."""
FRAMES_CALIBRATED = 32
"""Frames that rivals are calibrated on: of train, where answers are compared on test."""
RESNET_SIZE = 64
PUBLISHED = {"yolox": INIT, "nanodet": "nanodet_m_320.onnx", "fastestdet": "FastestDet.onnx"}
CONVERTED = {
    "mobilenet": ("mobilenet_v2", "mobilenet_v2_from_coral_ptq.pth"),
    "squeezenet": ("squeezenet1_0", "squeezenet1_0_from_deepcompression.pth"),
}


def make_detectors(data: Path, out: Path) -> None:
    """Frames and boxes of each clip, and its fine-tuned YOLOX-nano as `models/CLIP.onnx`."""
    copy_whole(need(data / "models" / INIT), out / "init" / INIT)
    queries = []
    for name, clip in CLIPS.items():
        once(out / "data" / name, partial(write_clip, need(data / "videos" / f"{clip}.mp4")))
        queries.append({
            "id": name, "camera": name, "task": "detection", "classes": ["car"], "model": f"models/{name}.onnx",
            "init": f"init/{INIT}", "data": f"data/{name}",
        })  # fmt: skip
    train(out, queries, "--passes", "120", "--cycles", "1", "--rate", "3e-4")


def write_clip(clip: Path, folder: Path) -> dict[str, Any]:
    """Write frames of a clip that the teacher saw, split in time."""
    boxes = boxes_by_frame(rows_of(clip.with_name(f"{clip.name}.teacher.jsonl")))
    frames = [(number, image) for number, image in frames_of(clip) if boxes.get(number)]
    chosen = [frames[at] for at in np.unique(np.linspace(0, len(frames) - 1, min(FRAMES, len(frames))).astype(int))]
    counts = {}
    for split, members in splits.in_time(chosen, gap=GAP).items():
        coco = CocoSplit(folder / split, ["car"])
        for number, image in members:
            coco.add(f"{folder.name.split('.')[0]}__{40 * number:06d}", image, boxes[number])
        counts[split] = coco.close()
    return counts


def make_classifiers(data: Path, out: Path) -> None:
    """Crops of each view, and its ResNet-50 as `models/VIEW.onnx`."""
    gti.prepare(data, out)
    common: dict[str, Any] = {
        "task": "classification", "classes": ["non-vehicle", "vehicle"], "model": "resnet50", "input_size": RESNET_SIZE,
    }  # fmt: skip
    first = "far"
    queries = [
        {
            "id": view, "camera": view, **common, "data": f"data/{view}-vehicle",
            "weights": f"weights/{view}.safetensors",
            **({} if view == first else {"init": f"weights/{first}.safetensors"}),
        }
        for view in gti.VIEWS
    ]  # fmt: skip
    train(out, queries[:1], "--passes", "400", "--cycles", "1")
    train(out, queries[1:], "--passes", "100", "--cycles", "1", "--rate", "3e-4")
    for query in queries:
        names = {"names": json.dumps(query["classes"])}
        write_resnet(out / query["weights"], out / "models" / f"{query['id']}.onnx", names)


def write_resnet(weights: Path, path: Path, metadata: dict[str, str]) -> None:
    """A trained ResNet-50 of two classes as ONNX."""
    from safetensors.torch import load_file
    from torchvision.models import resnet50

    model = resnet50(num_classes=2)
    model.load_state_dict(load_file(weights))
    export(model, path, RESNET_SIZE, metadata)


def export(model: Any, path: Path, side: int, metadata: dict[str, str]) -> None:
    """Write a network as ONNX for frames of one at a time, with ImageNet's mean and deviation in its metadata."""
    import onnx
    import torch

    if path.is_file():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = path.with_suffix(".partial")
    frame = torch.zeros(1, 3, side, side)
    torch.onnx.export(model.eval(), (frame,), partial_path, input_names=["frames"], output_names=["scores"],
                      opset_version=17, dynamo=False)  # fmt: skip
    document = onnx.load(partial_path)
    prepared = json.dumps(Preprocess((side, side)).to_json())
    onnx.helper.set_model_props(document, {GEMEL_PREPROCESS: prepared, **metadata})
    onnx.save(document, partial_path)
    partial_path.rename(path)


def make_unlike(data: Path, out: Path) -> None:
    """Three published detectors, two classifiers of ImageNet, a ResNet-50 of two classes; frames of streets."""
    import torch
    import torchvision

    folder = out.parent
    for name, source in PUBLISHED.items():
        copy_whole(need(data / "models" / source), out / "models" / f"{name}.onnx")
    for name, (architecture, source) in CONVERTED.items():
        model = getattr(torchvision.models, architecture)()
        model.load_state_dict(torch.load(need(data / "models" / source), weights_only=True))
        export(model, out / "models" / f"{name}.onnx", 224, {})
    copy_whole(need(folder / CLASSIFIERS / "models" / "far.onnx"), out / "models" / "resnet50.onnx")
    clip = need(data / "videos" / f"{CLIPS['hyde-park']}.mp4")
    for name in (*PUBLISHED, *CONVERTED, "resnet50"):
        once(out / "data" / name, partial(write_clip, clip))


def train(out: Path, queries: list[dict[str, Any]], *options: str) -> None:
    """Train the queries whose models are missing, by `gemel train`."""
    if all((out / query.get("weights", query["model"])).is_file() for query in queries):
        return
    cameras = {query["camera"]: {"source": f"data/{query['camera']}"} for query in queries}
    path = out / f"train-{queries[0]['id']}.yaml"
    path.write_text(yaml.safe_dump({"name": out.name, "cameras": cameras, "queries": queries}))
    command = [sys.executable, "-m", "gemel", "train", str(path), *options]
    subprocess.run(command, check=True, cwd=REPOSITORY)


def pictures_of(out: Path, name: str, parts: Sequence[str], count: int) -> list[Path]:
    """Pictures of a model's splits, at most so many, spread over them."""
    folder = next(path for path in (out / "data" / name, out / "data" / f"{name}-vehicle") if path.is_dir())
    paths = sorted(path for part in parts for path in (folder / part).rglob("*.[jp][pn]g"))
    return [paths[at] for at in np.unique(np.linspace(0, len(paths) - 1, min(count, len(paths))).astype(int))]


def write_inputs(out: Path, models: list[Path]) -> None:
    """`inputs/PART/MODEL.npz`: pictures uint8 RGB (N, 3, H, W), resized as the model takes them; `mean` and `std` (3,)
    of pixels in the order of its channels, and whether these are BGR. PART: `train` to calibrate on, `shown` of val and
    test.
    """
    for path in models:
        preprocess = ModelFile(path).complete().preprocess()
        assert preprocess is not None, f"{path}: nothing says how frames are prepared"
        mean, deviation = (values.ravel() for values in preprocess.pixel_constants())
        for part, parts, count in (("train", ("train",), FRAMES_CALIBRATED), ("shown", ("val", "test"), FRAMES_SHOWN)):
            target = out / "inputs" / part / f"{path.stem}.npz"
            if target.is_file():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            images = [read_picture(picture) for picture in pictures_of(out, path.stem, parts, count)]
            pictures = np.stack([preprocess.resize_frame(image) for image in images])
            np.savez(target, pictures=pictures, mean=mean, std=deviation, bgr=preprocess.channels == "bgr")


def make_files(name: str, out: Path, data: str | None = None) -> list[Path]:
    """Make a workload's files below `out`/NAME; returns its models."""
    folder = out / name
    footage = data_folder(data, REPOSITORY)
    if name == UNLIKE and not (out / CLASSIFIERS / "models" / "far.onnx").is_file():
        make_files(CLASSIFIERS, out, data)
    say(f"{name}: models and frames")
    {DETECTORS: make_detectors, CLASSIFIERS: make_classifiers, UNLIKE: make_unlike}[name](footage, folder)
    models = sorted((folder / "models").glob("*.onnx"))
    write_inputs(folder, models)
    return models


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=WORKLOADS)
    parser.add_argument("--out", type=Path, default=Path("out/compare"))
    arguments = parser.parse_args()
    for workload in arguments.workloads:
        print(workload, *make_files(workload, arguments.out))
