"""The same network in the forms that exporters write: answers as ONNX Runtime's, any batch, gradients, cut ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from gemel.models.graph import Graph, build_graph, load_graph
from gemel.models.graph.fill import fill_graph
from gemel.models.graph.stored import store_graph


class Small(nn.Module):
    """A convolution, a norm, attention over pixels, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.attention, self.after = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(frames))).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = self.after(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(x[:, 0])


def export(path: Path, dynamo: bool = False, **options) -> Path:
    model = Small().eval()
    assert model.norm.running_mean is not None
    model.norm.running_mean.uniform_(-0.5, 0.5)
    settings = {"input_names": ["frames"], "dynamo": dynamo, **({"external_data": False} if dynamo else {})}
    torch.onnx.export(model, (torch.rand(1, 3, 16, 16),), path, **settings, **options)
    return path


def weights_as_constants(path: Path) -> None:
    """Paddle's exporter writes weights as Constant nodes."""
    model = onnx.load(path)
    nodes = [helper.make_node("Constant", [], [one.name], value=one) for one in model.graph.initializer]
    nodes += list(model.graph.node)
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.extend(nodes)
    onnx.save(model, path)


def channels_last(path: Path) -> None:
    """TensorFlow's exporters take (N, H, W, 3) and transpose it."""
    model = onnx.load(path)
    name = model.graph.input[0].name
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 16, 16, 3]))
    model.graph.node.insert(0, helper.make_node("Transpose", ["images"], [name], perm=[0, 3, 1, 2]))
    onnx.save(model, path)


def weights_beside(path: Path) -> None:
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights/w.data", size_threshold=0)


def weights_as_inputs(path: Path) -> None:
    """Files of before IR version 4 list their weights among the inputs."""
    model = onnx.load(path)
    model.graph.input.extend(
        helper.make_tensor_value_info(one.name, one.data_type, one.dims) for one in model.graph.initializer
    )
    onnx.save(model, path)


def known_branch(path: Path) -> None:
    """An If whose condition is a constant, as exporters leave of a squeeze."""
    model = onnx.load(path)
    (output,) = model.graph.output
    name, output.name = output.name, "chosen"
    branches = [
        helper.make_graph([helper.make_node(kind, [name], [kind])], kind, [], [onnx.ValueInfoProto(name=kind)])
        for kind in ("Identity", "Neg")
    ]
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "condition"))
    model.graph.node.append(
        helper.make_node("If", ["condition"], ["chosen"], then_branch=branches[0], else_branch=branches[1])
    )
    onnx.save(model, path)


def nested_branches(path: Path) -> None:
    """An If in a branch of another one."""
    known_branch(path)
    model = onnx.load(path)
    inner = model.graph.node.pop()
    inner.output[0] = "inner"
    branch = helper.make_graph([inner], "branch", [], [onnx.ValueInfoProto(name="inner")])
    model.graph.node.append(helper.make_node("If", ["condition"], ["chosen"], then_branch=branch, else_branch=branch))
    onnx.save(model, path)


FORMS: dict[str, tuple[dict, Callable[[Path], None] | None]] = {
    "opset 11": ({"opset_version": 14}, None),
    "dynamic batch": ({"opset_version": 17, "dynamic_axes": {"frames": {0: "batch"}}}, None),
    "dynamic size": ({"opset_version": 16, "dynamic_axes": {"frames": {0: "batch", 2: "h", 3: "w"}}}, None),
    "dynamo": ({"dynamo": True, "opset_version": 20}, None),
    "weights as constants": ({"opset_version": 17}, weights_as_constants),
    "channels last": ({"opset_version": 17}, channels_last),
    "weights as inputs": ({"opset_version": 17}, weights_as_inputs),
    "known branch": ({"opset_version": 17}, known_branch),
    "nested branches": ({"opset_version": 17}, nested_branches),
    "external data": ({"opset_version": 17}, weights_beside),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("forms")


@pytest.mark.parametrize("name", FORMS)
def test_form_answers_as_onnx_runtime_at_any_batch(name, tmp_path: Path):
    options, change = FORMS[name]
    path = export(tmp_path / "model.onnx", **options)
    (tmp_path / "weights").mkdir()
    if change is not None:
        change(path)
    graph = load_graph(path, (16, 16))
    module = build(graph)
    frames = torch.rand(3, 3, 16, 16)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    feed = frames.permute(0, 2, 3, 1) if given.shape[-1] == 3 else frames
    answers = [session.run(None, {given.name: one[None].contiguous().numpy()}) for one in feed]
    wanted = np.concatenate([np.asarray(answer[0]) for answer in answers])
    (output,) = module(frames)
    np.testing.assert_allclose(output.detach().numpy(), wanted, rtol=1e-4, atol=1e-5)
    assert graph.input.shape == ("batch", 3, 16, 16) and graph.outputs[0].shape == ("batch", 5)
    output.square().sum().backward()
    layers = [one for one in module.modules() if isinstance(one, nn.Conv2d | nn.Linear)]
    assert len(layers) >= 4 and all(layer.weight.grad is not None for layer in layers)


class Older(nn.Module):
    """What opset 11 writes otherwise than opsets before it: bounds, margins, slices, and sides doubled twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        x = nn.functional.pad(nn.functional.relu6(self.stem(frames)), (1, 2, 0, 1), value=0.5)
        x = nn.functional.interpolate(x[:, :, 1:, 2:9], scale_factor=2.0, mode="nearest")
        x = nn.functional.interpolate(x, scale_factor=2.0, mode="nearest") * x.mean((2, 3), keepdim=True)
        return self.head(x.mean((2, 3)).topk(8)[0])


@pytest.mark.parametrize("opset", [9, 10])
def test_older_opset_answers_as_onnx_runtime_and_is_written(opset: int, tmp_path: Path):
    path, frames = tmp_path / "model.onnx", torch.rand(1, 3, 16, 16)
    torch.onnx.export(Older().eval(), (frames,), path, dynamo=False, opset_version=opset, input_names=["frames"])
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    wanted = np.asarray(session.run(None, {"frames": frames.numpy()})[0])
    graph = load_graph(path)
    (output,) = build(graph)(frames)
    np.testing.assert_allclose(output.detach().numpy(), wanted, rtol=1e-4, atol=1e-5)
    written = fill_graph(store_graph(graph), lambda key: graph.state[key].numpy()).to_proto().SerializeToString()
    session = onnxruntime.InferenceSession(written, providers=["CPUExecutionProvider"])
    again = np.asarray(session.run(None, {"frames": frames.numpy()})[0])
    np.testing.assert_allclose(again, wanted, rtol=1e-4, atol=1e-5)


def build(graph: Graph):
    module = build_graph(graph.document)
    module.load_state_dict(graph.state, strict=True)
    return module


def test_weights_have_the_names_of_the_model(tmp_path: Path):
    graph = load_graph(export(tmp_path / "model.onnx", opset_version=17))
    assert {"stem.weight", "head.weight", "head.bias", "token"} <= set(graph.state)
    assert all(torch.equal(graph.state[key], Small().state_dict()[key]) for key in ("head.weight", "token"))


def test_module_is_built_on_meta_without_memory(tmp_path: Path):
    graph = load_graph(export(tmp_path / "model.onnx", opset_version=17))
    module = build_graph(graph.document, device="meta")
    assert all(tensor.device.type == "meta" for tensor in module.state_dict().values())
    module.load_state_dict(graph.state, strict=True, assign=True)
    assert module(torch.rand(2, 3, 16, 16))[0].shape == (2, 5)


# Cut ends


def detector(*tail: onnx.NodeProto, outputs: tuple[str, ...], constants: dict[str, np.ndarray]) -> onnx.ModelProto:
    """A convolution makes boxes (1, 16, 4) and scores (1, 16, 3) of a picture, which `tail` selects from."""
    weights = {"w": np.random.default_rng(0).normal(size=(7, 3, 2, 2)), "shape": np.array([1, 7, 16]),
               "sizes": np.array([4, 3])}  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["images", "w"], ["map"], strides=[2, 2]),
        helper.make_node("Reshape", ["map", "shape"], ["rows"]),
        helper.make_node("Transpose", ["rows"], ["columns"], perm=[0, 2, 1]),
        helper.make_node("Split", ["columns", "sizes"], ["boxes", "logits"], axis=2),
        helper.make_node("Sigmoid", ["logits"], ["scores"]), *tail,
    ]  # fmt: skip
    initial = [
        numpy_helper.from_array(value.astype(np.float32) if value.dtype == np.float64 else value, name)
        for name, value in {**weights, **constants}.items()
    ]
    picture = helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 3, 8, 8])
    graph = helper.make_graph(nodes, "g", [picture], [onnx.ValueInfoProto(name=name) for name in outputs], initial)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def test_suppression_is_cut_off_and_recorded(tmp_path: Path):
    path = tmp_path / "model.onnx"
    onnx.save(detector(
        helper.make_node("Transpose", ["scores"], ["by_class"], perm=[0, 2, 1]),
        helper.make_node("NonMaxSuppression", ["boxes", "by_class", "most", "iou", "least"], ["kept"], name="nms"),
        helper.make_node("Gather", ["kept", "column"], ["found"], axis=1), outputs=("found",),
        constants={"most": np.array([100]), "iou": np.array([0.5], np.float32), "least": np.array([0.1], np.float32),
                   "column": np.array(2)},
    ), path)  # fmt: skip
    graph = load_graph(path)
    assert [(one.name, one.shape) for one in graph.outputs] == [
        ("boxes", ("batch", 16, 4)), ("by_class", ("batch", 3, 16)),
    ]  # fmt: skip
    assert graph.cut is not None
    assert (graph.cut.operator, graph.cut.node, graph.cut.inputs) == ("NonMaxSuppression", "nms", ("boxes", "by_class"))
    assert graph.cut.outputs == ("found",) and graph.cut.attributes["iou_threshold"] == 0.5
    assert [one.shape for one in build(graph)(torch.rand(2, 3, 8, 8))] == [(2, 16, 4), (2, 3, 16)]


def test_selection_at_the_end_is_cut_off_and_one_before_weights_stays(tmp_path: Path):
    path = tmp_path / "model.onnx"
    onnx.save(detector(
        helper.make_node("ReduceMax", ["scores"], ["best"], axes=[2], keepdims=0),
        helper.make_node("TopK", ["best", "k"], ["values", "places"], axis=1),
        helper.make_node("Unsqueeze", ["places", "last"], ["column"]),
        helper.make_node("Tile", ["column", "four"], ["index"]),
        helper.make_node("GatherElements", ["boxes", "index"], ["chosen"], axis=1), outputs=("chosen", "values"),
        constants={"k": np.array([5]), "last": np.array([2]), "four": np.array([1, 1, 4])},
    ), path)  # fmt: skip
    graph = load_graph(path)
    assert graph.cut is not None and graph.cut.operator == "TopK" and graph.cut.attributes["k"] == 5
    assert [(one.name, one.shape) for one in graph.outputs] == [
        ("scores", ("batch", 16, 3)), ("boxes", ("batch", 16, 4)),
    ]  # fmt: skip
    model = onnx.load(path)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((4, 2), np.float32), "v"))
    model.graph.node.append(helper.make_node("MatMul", ["chosen", "v"], ["refined"]))
    model.graph.output[0].name = "refined"
    onnx.save(model, path)
    graph = load_graph(path)
    assert graph.cut is None and graph.outputs[0].shape == ("batch", 5, 2)
