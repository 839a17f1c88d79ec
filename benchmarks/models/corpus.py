"""Reads a corpus of model files: exported here from torchvision, timm, transformers and libreyolo, and real ones.

Each file is imported, answers two pictures, is compared with ONNX Runtime, is written again as `gemel bundle export`
does it, and takes one training step. Weights are drawn. Files that the exporter cannot write are reported and not
counted.

Usage: python -m benchmarks.models.corpus [--folder out/corpus] [--only WORD] [--record FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gemel.models.decoders.graph_model import GraphAnswers
from gemel.models.decoders.heads import head_of
from gemel.models.errors import message_of
from gemel.models.graph import Graph, build_graph, load_graph
from gemel.models.graph.fill import fill_graph
from gemel.models.graph.onnx_reader import LUMA
from gemel.models.graph.stored import store_graph
from gemel.models.graph.unfold import unfold_norms

HALF = "half-"
OPEN_SIZES = {"_det_infer": (320, 320), "_rec_infer": (48, 320), "_cls_infer": (48, 192), "_dynamic": (320, 320),
              "paddle_squeezenet": (224, 224)}  # fmt: skip
"""For published files that leave the size open, by a part of their names."""
WHOLE = ("yolox", "yunet", "common_det")
"""Parts of the names of files that take 0..255, where rounding counts less."""
ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-4
"""Of the outputs' difference from ONNX Runtime's, by the greatest of them."""
HALF_TOLERANCE = 1e-3
"""For files of half precision, which ONNX Runtime computes in it: the step between its numbers."""


@dataclass(frozen=True)
class Entry:
    """One file to make: `exporter` is torch's `legacy` or `dynamo`, libreyolo's `own`, or `pt2` of torch.export."""

    source: str
    model: str
    exporter: str
    opset: int
    size: int
    dynamic: bool = False

    @property
    def name(self) -> str:
        """The file's name."""
        ending = "pt2" if self.exporter == "pt2" else "onnx"
        return f"{self.source}-{self.model}-{self.exporter}-{self.opset}{'-batch' if self.dynamic else ''}.{ending}"


@dataclass
class Row:
    """What became of one file; `difference` is relative to the greatest output."""

    file: str
    mb: float = 0.0
    nodes: int = 0
    seconds: float = 0.0
    batch: str = ""
    difference: float | None = None
    batch_difference: float | None = None
    written_difference: float | None = None
    step: bool = False
    cut: str = ""
    error: str = ""

    @property
    def passed(self) -> bool:
        """Whether the file imports, answers as ONNX Runtime does, also once written again, and can be trained."""
        found = (self.difference, self.batch_difference, self.written_difference)
        limit = HALF_TOLERANCE if HALF in self.file else TOLERANCE
        near = [one is not None and one <= limit for one in found]
        return not self.error and all(near) and self.step


LEGACY, DYNAMO = (11, 12, 13, 14, 15, 16, 17), (18, 19, 20, 21, 22, 23)
TORCHVISION = {
    "resnet18": 64, "mobilenet_v2": 64, "mobilenet_v3_small": 64, "efficientnet_b0": 64, "regnet_y_400mf": 64,
    "shufflenet_v2_x0_5": 64, "squeezenet1_0": 64, "densenet121": 64, "googlenet": 64, "mnasnet0_5": 64,
    "convnext_tiny": 64, "vit_b_32": 224, "swin_t": 64, "swin_v2_t": 64, "inception_v3": 96,
    "segmentation.lraspp_mobilenet_v3_large": 64, "segmentation.deeplabv3_mobilenet_v3_large": 64,
    "detection.ssdlite320_mobilenet_v3_large": 320, "detection.retinanet_resnet50_fpn": 128,
}  # fmt: skip
TIMM = {
    "convnext_atto": 64, "vit_tiny_patch16_224": 224, "efficientnet_lite0": 64, "mobilenetv4_conv_small": 64,
    "ghostnet_100": 64, "tf_efficientnet_lite0": 64, "mixnet_s": 64, "levit_128s": 224, "mobilevit_xxs": 64,
    "edgenext_xx_small": 64, "poolformer_s12": 64, "deit_tiny_patch16_224": 224, "mixer_s32_224": 224,
    "repvgg_a0": 64, "fastvit_t8": 64, "efficientformerv2_s0": 224, "tiny_vit_5m_224": 224, "hgnetv2_b0": 64,
    "hrnet_w18_small": 64, "xcit_nano_12_p16_224": 224, "nfnet_l0": 64, "eva02_tiny_patch14_224": 224,
    "coat_lite_tiny": 224, "resmlp_12_224": 224, "rexnet_100": 64, "maxvit_rmlp_pico_rw_256": 256,
}  # fmt: skip
TRANSFORMERS = {
    "vit": 64, "resnet": 64, "convnext": 64, "swin": 64, "segformer": 64, "dinov2": 70, "detr": 64, "yolos": 64,
    "rt_detr": 160, "rt_detr_v2": 160, "d_fine": 160, "mobilevit": 64, "dpt": 64, "beit": 64, "mobilenet_v2": 64,
}  # fmt: skip
LIBREYOLO = {"LibreYOLOX": "n", "LibreYOLO9": "t", "LibreDFINE": "n", "LibreRTMDet": "t",
             "LibreYOLONAS": "s", "LibreYOLO7": "b", "LibreYOLO9E2E": "t", "LibreDEIM": "n"}  # fmt: skip
FORMS = {
    "lstm": "legacy-12 legacy-14 dynamo-18", "gru": "legacy-13 legacy-14", "half-resnet18": "legacy-17 dynamo-20",
    "half-mobilenet_v2": "legacy-16", "resnet18": "legacy-7 legacy-9", "mobilenet_v2": "legacy-8 legacy-10",
    "segmentation.lraspp_mobilenet_v3_large": "legacy-9 legacy-10", "shufflenet_v2_x0_5": "legacy-9",
}  # fmt: skip
"""Readers of text with recurrent layers, half precision, and opsets before 11."""
PT2 = {"torchvision": ("resnet18", "mobilenet_v3_small"), "timm": ("convnext_atto", "deit_tiny_patch16_224")}


def entries() -> list[Entry]:
    """The corpus: every model once or twice, opsets in turn."""
    found = []
    for source, models in (("torchvision", TORCHVISION), ("timm", TIMM), ("transformers", TRANSFORMERS)):
        for number, (model, size) in enumerate(models.items()):
            legacy = Entry(source, model, "legacy", LEGACY[number % len(LEGACY)], size, number % 2 == 0)
            dynamo = Entry(source, model, "dynamo", DYNAMO[number % len(DYNAMO)], size, number % 3 == 0)
            both = source == "torchvision" or number % 2 == 0
            found += [legacy, dynamo] if both else [legacy if number % 4 == 1 else dynamo]
    found += [Entry("libreyolo", model, "own", 13 + number % 5, 320) for number, model in enumerate(LIBREYOLO)]
    made = [(model, *one.split("-")) for model, each in FORMS.items() for one in each.split()]
    found += [Entry("forms", model, exporter, int(opset), 64) for model, exporter, opset in made]
    sizes = {"torchvision": TORCHVISION, "timm": TIMM}
    found += [Entry(source, model, "pt2", 18, sizes[source][model]) for source, names in PT2.items() for model in names]
    return found


class Tensors(nn.Module):
    """A model that returns its tensors alone, as exporters need."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, frames: torch.Tensor) -> Any:
        """The float tensors of the model's answer."""
        return tuple(_tensors(self.model(frames)))


def _tensors(answer: Any) -> list[torch.Tensor]:
    if isinstance(answer, torch.Tensor):
        return [answer]
    if hasattr(answer, "logits"):
        return [answer[key] for key in ("logits", "pred_boxes") if key in answer]
    if hasattr(answer, "predicted_depth"):
        return [answer.predicted_depth]
    values = answer.values() if isinstance(answer, dict) else answer
    return [tensor for value in values for tensor in _tensors(value)] if values is not None else []


def build_model(entry: Entry) -> nn.Module:
    """The model of an entry with drawn weights."""
    torch.manual_seed(0)
    if entry.model in ("lstm", "gru"):
        return _draw(_TextReader(nn.LSTM if entry.model == "lstm" else nn.GRU))
    if entry.source in ("torchvision", "forms"):
        import torchvision

        kind, _, name = entry.model.removeprefix(HALF).rpartition(".")
        options = {} if entry.model not in ("googlenet", "inception_v3") else {"init_weights": False}
        options |= {"weights_backbone": None} if kind else {}
        module = getattr(torchvision.models, kind) if kind else torchvision.models
        model = getattr(module, name)(weights=None, **options)
        if kind == "detection":
            model.transform.min_size, model.transform.max_size = (entry.size,), entry.size
            return _draw(_Detections(model))
        return _draw(Tensors(model))
    if entry.source == "timm":
        import timm  # pyright: ignore[reportMissingImports]

        return _draw(timm.create_model(entry.model, pretrained=False))
    return _draw(Tensors(_transformer(entry.model, entry.size)))


class _TextReader(nn.Module):
    """Convolutions to columns of the picture, two recurrent layers in both directions, letters for each column."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, (2, 1), 1), nn.ReLU()]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(96, 37)
        self.recurrent = kind(64, 48, num_layers=2, bidirectional=True)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        columns = self.body(frames).mean(2).permute(2, 0, 1)
        return self.head(self.recurrent(columns)[0]).permute(1, 0, 2)


class _Detections(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, frames: torch.Tensor) -> Any:
        (found,) = self.model([frames[0]])
        return found["boxes"], found["scores"], found["labels"]


def _transformer(name: str, size: int) -> nn.Module:
    import transformers as hf  # pyright: ignore[reportMissingImports]

    small: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    detector: dict[str, Any] = {"encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    makers: dict[str, Callable[[], hf.PreTrainedModel]] = {
        "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(image_size=size, patch_size=16, **small)),
        "resnet": lambda: hf.ResNetForImageClassification(
            hf.ResNetConfig(hidden_sizes=[16, 32, 48, 64], depths=[1] * 4)
        ),
        "convnext": lambda: hf.ConvNextForImageClassification(
            hf.ConvNextConfig(hidden_sizes=[16, 32, 48, 64], depths=[1] * 4)
        ),
        "swin": lambda: hf.SwinForImageClassification(
            hf.SwinConfig(image_size=size, embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=4)
        ),
        "segformer": lambda: hf.SegformerForSemanticSegmentation(hf.SegformerConfig()),
        "dinov2": lambda: hf.Dinov2ForImageClassification(hf.Dinov2Config(image_size=size, patch_size=14, **small)),
        "detr": lambda: hf.DetrForObjectDetection(
            hf.DetrConfig(
                use_timm_backbone=False, backbone=None, use_pretrained_backbone=False, d_model=64, num_queries=20,  # type: ignore[call-arg]
                backbone_config=hf.ResNetConfig(
                    hidden_sizes=[16, 32, 48, 64], depths=[1] * 4, out_features=["stage4"]  # type: ignore[call-arg]
                ), **detector,
            )
        ),
        "yolos": lambda: hf.YolosForObjectDetection(
            hf.YolosConfig(image_size=[size, size], patch_size=16, num_detection_tokens=10, **small)
        ),
        "rt_detr": lambda: hf.RTDetrForObjectDetection(hf.RTDetrConfig(num_queries=525, **_rt(hf, 2))),
        "rt_detr_v2": lambda: hf.RTDetrV2ForObjectDetection(hf.RTDetrV2Config(num_queries=525, **_rt(hf, 2))),
        "d_fine": lambda: hf.DFineForObjectDetection(hf.DFineConfig(num_queries=525, decoder_layers=2)),
        "mobilevit": lambda: hf.MobileViTForImageClassification(hf.MobileViTConfig(image_size=size)),
        "dpt": lambda: hf.DPTForDepthEstimation(
            hf.DPTConfig(
                image_size=size, patch_size=16, neck_hidden_sizes=[16, 16, 32, 32], fusion_hidden_size=32,
                backbone_out_indices=[0, 1, 1, 1], is_hybrid=False, **small,
            )
        ),
        "beit": lambda: hf.BeitForImageClassification(
            hf.BeitConfig(image_size=size, patch_size=16, use_relative_position_bias=True, **small)
        ),
        "mobilenet_v2": lambda: hf.MobileNetV2ForImageClassification(hf.MobileNetV2Config(image_size=size)),
    }  # fmt: skip
    model = makers[name]()
    if "detr" in name or "fine" in name:  # else all queries have one score, and rounding selects them
        for module in model.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight)
    model.set_attn_implementation("eager")
    return model


def _rt(hf: Any, layers: int) -> dict[str, Any]:
    backbone = hf.RTDetrResNetConfig(
        hidden_sizes=[64, 128, 256, 512],
        depths=[1] * 4,
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    return {"decoder_layers": layers, "backbone_config": backbone, "encoder_in_channels": [128, 256, 512]}


def _draw(model: nn.Module) -> nn.Module:
    """Draw what an untrained model leaves at zero or one, so that every part of the network counts."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point() and tensor.numel() > 1 and tensor.flatten()[0] == tensor.flatten()[-1] == 0:
                tensor.normal_(0, 0.02)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d) and module.running_var is not None:
                module.running_var.uniform_(0.5, 1.5)
    return model.eval()


def export_entry(entry: Entry, path: Path) -> None:
    """Write the file of an entry."""
    if entry.source == "libreyolo":
        import libreyolo  # pyright: ignore[reportMissingImports]

        kind = getattr(libreyolo, entry.model)
        model = kind(None, size=LIBREYOLO[entry.model], device="cpu")
        _draw(model.model)
        written = model.export(format="onnx", imgsz=entry.size, opset=entry.opset, output_path=str(path))
        if written and Path(written) != path:
            Path(written).replace(path)
        return
    model, frames = build_model(entry), torch.rand(1, 3, entry.size, entry.size)
    if entry.exporter == "pt2":
        torch.export.save(torch.export.export(model, (frames,)), path)
        return
    if entry.model.startswith(HALF):
        model, frames = model.half(), frames.half()
    dynamic: dict[str, Any] = {}
    if entry.dynamic and entry.exporter == "legacy":
        dynamic["dynamic_axes"] = {"frames": {0: "batch"}}
    elif entry.dynamic:
        dynamic["dynamic_shapes"] = ({0: torch.export.Dim("batch")},)
        frames = frames.repeat(2, 1, 1, 1)
    torch.onnx.export(
        model, (frames,), path, dynamo=entry.exporter == "dynamo", opset_version=entry.opset, input_names=["frames"],
        external_data=False, verbose=False, **dynamic,
    )  # fmt: skip


def check_file(path: Path, size: tuple[int, int] | None = None) -> Row:
    """Import one file, compare it with ONNX Runtime, and take a training step."""
    row = Row(path.name, mb=round(path.stat().st_size / 1e6, 1))
    try:
        began = time.perf_counter()
        graph = load_graph(path, size)
        row.seconds = round(time.perf_counter() - began, 2)
        network = build_graph(graph.document)
        network.load_state_dict(graph.state, strict=True)
        module = GraphAnswers(network, head_of(graph), graph.input.shape[0] != "batch")
        row.nodes, row.batch = len(network.list_steps()), str(graph.input.shape[0])
        row.cut = graph.cut.operator if graph.cut else ""
        torch.manual_seed(0)
        scale = 255 if any(word in path.name.lower() for word in WHOLE) else 1  # as it was trained
        frames = torch.rand([2, *(int(one) for one in graph.input.shape[1:])]) * scale
        if path.name.endswith("_det_infer.onnx"):  # of values with a mean of 0, else all its scores are 1e-5
            frames = (frames - 0.45) / 0.22
        if graph.file_input is not None and graph.file_input.dtype == "uint8":
            frames = (frames * 255).round()
        with torch.no_grad():
            both, single = module.answer(frames), module.answer(frames[1:])
        expected = _reference(path, graph, frames)
        queries = any(step.name == "TopK" for step in network.list_steps())
        row.difference = max(_difference(one[:1], two, queries) for one, two in zip(both, expected))
        row.batch_difference = max(_difference(one[1:], two.numpy(), queries) for one, two in zip(both, single))
        row.written_difference = _written_difference(graph, frames, expected, queries)
        row.step = take_step(module, frames)
    except Exception as error:  # a corpus goes on after any failure, and names it
        row.error = message_of(error)[:300]
    return row


def _reference(path: Path, graph: Graph, frames: torch.Tensor) -> list[np.ndarray]:
    """ONNX Runtime's outputs for the first picture, of a file's own graph; those that a cut made by name too."""
    import onnx
    import onnxruntime

    names = [output.name for output in graph.outputs]
    if path.suffix == ".pt2":
        with torch.no_grad():
            found = torch.export.load(path).module()(frames[:1])
        return [one.numpy() for one in (found if isinstance(found, tuple) else (found,))]
    model = onnx.load(path)
    known = {output.name for output in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = _feeds(session, frames[:1])
    batch = max(len(values) for values in feeds.values())
    found = [np.asarray(one) for one in session.run(names, feeds)]
    return [one[: len(one) // batch] if batch > 1 else one for one in found]


def _feeds(session: Any, picture: Tensor) -> dict[str, np.ndarray]:
    """What a session takes: the picture, and its size where another input asks for one."""
    sizes = np.array([[picture.shape[3], picture.shape[2]]])
    feeds: dict[str, np.ndarray] = {}
    for one in session.get_inputs():
        is_last = len(one.shape) == 4 and one.shape[3] == 3 and one.shape[1] != 3
        values = picture.permute(0, 2, 3, 1) if is_last else picture
        if len(one.shape) == 4 and one.shape[1] == 1:
            values = torch.einsum("nchw,c->nhw", picture, torch.tensor(LUMA))[:, None]
        values = values.repeat(one.shape[0] if isinstance(one.shape[0], int) else 1, 1, 1, 1).numpy()
        kind = {"tensor(uint8)": np.uint8, "tensor(float16)": np.float16}.get(one.type, np.float32)
        feeds[one.name] = np.ascontiguousarray(values, kind) if len(one.shape) == 4 else sizes
    return feeds


def _written_difference(graph: Graph, frames: torch.Tensor, expected: list[np.ndarray], queries: bool) -> float:
    """The greatest difference of the outputs that the file and the graph written again, its norms folded, both have."""
    import onnxruntime

    kept = unfold_norms(graph)
    arrays = {key: weight.numpy() for key, weight in kept.state.items()}
    data = fill_graph(store_graph(kept), arrays.__getitem__).to_proto().SerializeToString()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    known = {one.name for one in session.get_outputs()}
    both = [(one.name, wanted) for one, wanted in zip(graph.outputs, expected) if one.name in known]
    found = session.run([name for name, _ in both], _feeds(session, frames[:1]))
    return max(
        (_difference(torch.from_numpy(one), wanted, queries) for one, (_, wanted) in zip(found, both)), default=0
    )


def _difference(output: torch.Tensor, expected: np.ndarray, queries: bool = False) -> float:
    """The greatest difference by the greatest value; `queries` that a top-k selected may be in another order."""
    wanted = torch.from_numpy(np.array(expected)).double()
    if output.numel() != wanted.numel():
        return float("inf")
    if not wanted.numel():
        return 0.0
    output = output.double().reshape(wanted.shape)
    plain = (output - wanted).abs().max().item()
    if queries and wanted.ndim == 3:
        plain = min(plain, (output.sort(1).values - wanted.sort(1).values).abs().max().item())
    return plain / max(1e-3, wanted.abs().max().item())


def take_step(module: GraphAnswers, frames: torch.Tensor) -> bool:
    """One step of SGD towards drawn outputs: whether gradients are finite, reach the layers and change the answer."""
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=1e-3)
    before = [one.detach().clone() for one in module.answer(frames)]
    outputs = [one for one in module.answer(frames) if one.is_floating_point() and one.requires_grad]
    loss = sum(((one - torch.randn_like(one)).square().mean() for one in outputs), torch.zeros(()))
    loss.backward()
    gradients = [parameter.grad for parameter in weights if parameter.grad is not None]
    if not gradients or not all(gradient.isfinite().all() for gradient in gradients):
        return False
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    optimizer.step()
    with torch.no_grad():
        after = module.answer(frames)
    return any(not torch.equal(one, two) for one, two in zip(before, after))


def print_row(row: Row) -> None:
    """One line: megabytes, nodes, seconds, batch, differences from ONNX Runtime, of a batch, once written; step."""
    all_figures = (row.difference, row.batch_difference, row.written_difference)
    figures = " ".join(f"{'-' if one is None else f'{one:.0e}':>8}" for one in all_figures)
    print(
        f"{row.file:64} {row.mb:6} {row.nodes:6} {row.seconds:6} {row.batch:>6} {figures} "
        f"{'step' if row.step else 'no step'} {row.cut or row.error}", flush=True,
    )  # fmt: skip


def main() -> None:
    """Make the files that are not there yet, check all, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "out" / "corpus")
    parser.add_argument("--real", type=Path, default=ROOT.parent / "shared" / "data" / "models")
    parser.add_argument("--only", default="", help="files whose name contains this")
    parser.add_argument("--record", type=Path, help="JSON file that keeps the rows; those of other files stay")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    made = (make_file(entry, arguments.folder) for entry in entries() if arguments.only in entry.name)
    real = (path for path in sorted(arguments.real.glob("*.onnx")) if arguments.only in path.name)
    rows = []
    for path in chain(made, real):
        if path is not None:
            size = next((size for part, size in OPEN_SIZES.items() if part in path.name), None)
            rows.append(check_file(path, size))
            print_row(rows[-1])
            if arguments.record:
                record_row(rows[-1], arguments.record)
    print(f"{sum(row.passed for row in rows)} of {len(rows)} pass")


def make_file(entry: Entry, folder: Path) -> Path | None:
    """The file of an entry, exported unless it is there; None, with the reason printed, where its exporter fails."""
    path = folder / entry.name
    failure = path.with_suffix(".failed")
    if not path.exists() and not failure.exists():
        try:
            export_entry(entry, path)
        except Exception as error:  # an exporter's failure is no import's
            failure.write_text(message_of(error)[:300])
    if path.exists():
        return path
    print(f"not exported: {path.name}: {failure.read_text()[:150]}")
    return None


def record_row(row: Row, path: Path) -> None:
    """Keep a row, in the place of an older one of the same file."""
    rows = {one["file"]: one for one in (json.loads(path.read_text()) if path.exists() else [])}
    rows[row.file] = asdict(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([rows[name] for name in sorted(rows)], indent=1) + "\n")


if __name__ == "__main__":
    main()
