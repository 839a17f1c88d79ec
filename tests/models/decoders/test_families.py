"""Each decoder against the family's own code, or its published formula written once more in NumPy."""

import numpy as np
import pytest
import torch
from torchvision.models import ResNet18_Weights
from torchvision.models.detection import RetinaNet_ResNet50_FPN_Weights

from gemel.models.decoders import choose_decoder, coco_names, coco_numbers, imagenet_names
from gemel.models.decoders.classifier import Classifier
from gemel.models.decoders.decoder import GraphHead, Output
from gemel.models.decoders.yolo_parts import YoloObb
from gemel.models.decoders.yolox import Yolox
from gemel.models.errors import InputError
from gemel.models.graph import Cut
from gemel.testing import check_decoder

SIZE = (96, 160)
CLASSES = 3
STRIDES = (8, 16, 32)
BOX_TOLERANCE_PX, SCORE_TOLERANCE = 0.5, 1e-3
CELLS = sum((SIZE[0] // stride) * (SIZE[1] // stride) for stride in STRIDES)


def draw(*shape: int, low: float = 0.0, high: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.empty(shape).uniform_(low, high, generator=torch.Generator().manual_seed(seed))


def decode(name: str, outputs: list[torch.Tensor], tails: list[set[str]] | None = None, **metadata: str):
    """Boxes in pixels of the input and scores, of the decoder that fits the outputs."""
    tails = tails or [set()] * len(outputs)
    head = GraphHead(
        tuple(
            Output(f"out{index}", tuple(one.shape[1:]), frozenset(tail))
            for index, (one, tail) in enumerate(zip(outputs, tails, strict=True))
        ),
        SIZE,
        metadata,
    )
    decoder = choose_decoder(name, head, "detection", CLASSES, "model.onnx")
    boxes, scores = decoder.decode(outputs, SIZE)[:2]
    check_decoder(decoder, [output.numpy() for output in outputs], SIZE)
    return boxes * torch.tensor([SIZE[1], SIZE[0]] * 2), scores, decoder


def assert_equal(found, boxes, scores) -> None:
    assert np.abs(np.asarray(found[0]) - np.asarray(boxes)).max() < BOX_TOLERANCE_PX
    assert np.abs(np.asarray(found[1]) - np.asarray(scores)).max() < SCORE_TOLERANCE


def to_corners(boxes: np.ndarray) -> np.ndarray:
    x, y, width, height = np.moveaxis(boxes, -1, 0)
    return np.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], axis=-1)


def pixel_boxes(count: int) -> torch.Tensor:
    """Centre and sides (2, count, 4) in pixels of the input."""
    return draw(2, count, 4) * torch.tensor([160, 96, 80, 48])


@pytest.mark.parametrize("rows", [False, True])
def test_yolo_columns_or_rows_are_corners_and_scores(rows: bool) -> None:
    values = torch.cat([pixel_boxes(CELLS), draw(2, CELLS, CLASSES, seed=1)], dim=2)
    outputs = [values if rows else values.transpose(1, 2)]
    found = decode("yolo", outputs)
    assert_equal(found, to_corners(values[..., :4].numpy()), values[..., 4:])


def test_yolo_of_masks_leaves_their_coefficients_out() -> None:
    values = torch.cat([pixel_boxes(CELLS), draw(2, CELLS, CLASSES + 32, seed=1)], dim=2).transpose(1, 2)
    _, scores, decoder = decode("auto", [values, draw(2, 32, 24, 40)])
    assert decoder.name == "yolo-seg" and scores.shape == (2, CELLS, CLASSES)


def test_yolov5_score_is_objectness_times_class() -> None:
    values = torch.cat([pixel_boxes(3 * CELLS), draw(2, 3 * CELLS, 1 + CLASSES, seed=1)], dim=2)
    found = decode("auto", [values])
    assert found[2].name == "yolov5"
    assert_equal(found, to_corners(values[..., :4].numpy()), values[..., 4:5] * values[..., 5:])


def raw_yolox() -> list[torch.Tensor]:
    """The maps of the three levels, each (1, 5 + C, H, W)."""
    maps = [draw(1, 5 + CLASSES, SIZE[0] // stride, SIZE[1] // stride, seed=stride) for stride in STRIDES]
    return [torch.cat([one[:, :4] * 2 - 0.5, one[:, 4:]], dim=1) for one in maps]


def test_yolox_raw_is_what_libreyolo_decodes() -> None:
    theirs = pytest.importorskip("libreyolo.postprocess.yolox").decode_outputs([one.clone() for one in raw_yolox()])
    rows = torch.cat([one.flatten(2).transpose(1, 2) for one in raw_yolox()], dim=1)
    found = decode("yolox", [rows], [{"Sigmoid", "Concat", "Reshape", "Transpose"}])
    assert_equal(found, to_corners(theirs[..., :4].numpy()), theirs[..., 4:5] * theirs[..., 5:])


def test_yolox_decoded_in_the_graph_is_not_decoded_again() -> None:
    values = torch.cat([pixel_boxes(CELLS), draw(2, CELLS, 1 + CLASSES, seed=1)], dim=2)
    found = decode("yolox", [values], [{"Exp", "Add", "Mul", "Sigmoid"}])
    assert_equal(found, to_corners(values[..., :4].numpy()), values[..., 4:5] * values[..., 5:])
    prepared = found[2].preprocess({}, SIZE)
    assert prepared is not None and prepared.channels == "bgr"


def test_yolov6_has_the_layout_of_yolox_and_the_frames_of_yolov5() -> None:
    values = torch.cat([pixel_boxes(CELLS), draw(2, CELLS, 1 + CLASSES, seed=1)], dim=2)
    *_, decoder = decode("yolox", [values], [{"Add", "Mul", "Sub", "Sigmoid"}])
    prepared = decoder.preprocess({}, SIZE)
    assert prepared is not None and prepared.channels == "rgb"
    assert isinstance(decoder, Yolox) and not decoder.strides


def nanodet_reference(scores: np.ndarray, values: np.ndarray, strides: tuple[int, ...], offset: float):
    """Corners by the formula of gfl_head.py: centre -+ expected distance x stride."""
    boxes, start = [], 0
    for stride in strides:
        for row in range(-(-SIZE[0] // stride)):
            for column in range(-(-SIZE[1] // stride)):
                exponents = np.exp(values[0, start].reshape(4, 8))
                left, top, right, bottom = (exponents / exponents.sum(1, keepdims=True)) @ np.arange(8) * stride
                x, y = (column + offset) * stride, (row + offset) * stride
                boxes.append([x - left, y - top, x + right, y + bottom])
                start += 1
    return np.array(boxes)[None], scores


def test_nanodet_levels_in_any_order_follow_the_published_formula() -> None:
    counts = [(SIZE[0] // stride) * (SIZE[1] // stride) for stride in STRIDES]
    scores, values = draw(1, CELLS, CLASSES), draw(1, CELLS, 32, high=4, seed=1)
    levels = list(zip(scores.split(counts, 1), values.split(counts, 1), strict=True))
    outputs = [levels[2][1], levels[0][0], levels[0][1], levels[1][0], levels[2][0], levels[1][1]]
    found = decode("auto", outputs, [{"Sigmoid"} if one.shape[2] == CLASSES else set() for one in outputs])
    assert found[2].name == "nanodet"
    assert_equal(found, *nanodet_reference(scores.numpy(), values.numpy(), STRIDES, 0.5))


def test_nanodet_plus_single_output_takes_corners_for_centres() -> None:
    strides = (8, 16, 32, 64)
    count = CELLS + 2 * 3
    scores, values = draw(1, count, CLASSES), draw(1, count, 32, high=4, seed=1)
    found = decode("nanodet", [torch.cat([scores, values], dim=2)], [{"Sigmoid"}])
    assert_equal(found, *nanodet_reference(scores.numpy(), values.numpy(), strides, 0.0))


def test_nanodet_distances_are_what_libreyolo_decodes() -> None:
    theirs = pytest.importorskip("libreyolo.postprocess.picodet")._per_level_filter_topk
    shapes = [(SIZE[0] // stride, SIZE[1] // stride) for stride in STRIDES]
    logits = [draw(1, CLASSES, *shape, low=-3, high=3, seed=shape[0]) for shape in shapes]
    values = [draw(1, 32, *shape, high=4, seed=shape[1]) for shape in shapes]
    scores, _, boxes = theirs(logits, values, STRIDES, 7, 0.0, 10_000)
    rows = [torch.cat([one.flatten(2).transpose(1, 2) for one in maps], dim=1) for maps in (logits, values)]
    found = decode("nanodet", [torch.cat(rows, dim=2)])
    assert_equal(found, boxes.reshape(1, CELLS, CLASSES, 4)[:, :, 0], scores.reshape(1, CELLS, CLASSES))


def test_fastestdet_map_follows_the_authors_formula() -> None:
    rows, columns = SIZE[0] // 16, SIZE[1] // 16
    values = draw(1, 5 + CLASSES, rows, columns, low=-1, high=1)
    values[:, [0, *range(5, 5 + CLASSES)]] = values[:, [0, *range(5, 5 + CLASSES)]].abs()
    boxes = []
    for row in range(rows):
        for column in range(columns):
            x, y, width, height = values[0, 1:5, row, column].double().numpy()
            centre = (np.tanh(x) + column) * 16, (np.tanh(y) + row) * 16
            boxes.append([*centre, SIZE[1] / (1 + np.exp(-width)), SIZE[0] / (1 + np.exp(-height))])
    flat = values.flatten(2).transpose(1, 2).numpy()
    found = decode("auto", [values])
    assert found[2].name == "fastestdet"
    assert_equal(found, to_corners(np.array([boxes])), flat[..., :1] ** 0.6 * flat[..., 5:] ** 0.4)


def test_end_to_end_rows_score_their_own_class_alone() -> None:
    rows = torch.tensor([[[8.0, 4.0, 80.0, 48.0, 0.9, 2.0], [0, 0, 0, 0, 0, 0]]])
    boxes, scores, decoder = decode("auto", [rows.expand(1, 2, 6)], names="{0: 'a', 1: 'b', 2: 'c'}")
    assert decoder.name == "yolo-end2end" and decoder.nms_iou is None
    assert boxes[0, 0].tolist() == pytest.approx([8, 4, 80, 48])
    assert scores[0].flatten().tolist() == pytest.approx([0, 0, 0.9, 0, 0, 0])


@pytest.mark.parametrize("logits_first", [True, False])
def test_detr_sigmoid_is_what_transformers_decodes(logits_first: bool) -> None:
    transformers = pytest.importorskip("transformers")
    logits, boxes = draw(2, 30, CLASSES, low=-4, high=2), draw(2, 30, 4, seed=1)
    answer = type("Answer", (), {"logits": logits, "pred_boxes": boxes})
    processor = transformers.RTDetrImageProcessor()
    theirs = processor.post_process_object_detection(answer, threshold=0.0, target_sizes=[SIZE, SIZE])
    found = decode("auto", [logits, boxes] if logits_first else [boxes, logits])
    assert found[2].name == "detr" and found[2].nms_iou is None
    for frame, expected in enumerate(theirs):
        best, index = found[1][frame].flatten().topk(30)
        assert torch.allclose(best, expected["scores"], atol=SCORE_TOLERANCE)
        assert torch.equal(index % CLASSES, expected["labels"])
        assert torch.allclose(found[0][frame][index // CLASSES], expected["boxes"], atol=BOX_TOLERANCE_PX)


def test_detr_softmax_leaves_no_object_out_as_transformers_does() -> None:
    transformers = pytest.importorskip("transformers")
    logits, boxes = draw(1, 30, CLASSES + 1, low=-4, high=4), draw(1, 30, 4, seed=1)
    answer = type("Answer", (), {"logits": logits, "pred_boxes": boxes})
    (theirs,) = transformers.DetrImageProcessor().post_process_object_detection(answer, 0.0, [SIZE])
    found = decode("auto", [logits, boxes], [set(), {"Sigmoid"}], names="['a', 'b', 'c']")
    assert torch.allclose(found[1][0].max(dim=1).values, theirs["scores"], atol=SCORE_TOLERANCE)
    assert torch.equal(found[1][0].argmax(dim=1), theirs["labels"])
    assert torch.allclose(found[0][0], theirs["boxes"], atol=BOX_TOLERANCE_PX)


def test_detr_of_one_output_is_rtdetr_of_ultralytics() -> None:
    values = torch.cat([draw(1, 30, 4), draw(1, 30, CLASSES, seed=1)], dim=2)
    found = decode("auto", [values], description="Ultralytics RT-DETR-l model trained on coco.yaml")
    pixels = to_corners(values[..., :4].numpy()) * np.array([160, 96, 160, 96])
    assert found[2].name == "detr"
    assert_equal(found, pixels, values[..., 4:])


def test_ssd_leaves_the_background_of_a_softmax_out() -> None:
    boxes, scores = draw(1, 1917, 4), draw(1, 1917, 1 + CLASSES, seed=1)
    found = decode("auto", [scores, boxes], [{"Softmax"}, {"Exp", "Mul"}])
    assert found[2].name == "ssd"
    assert_equal(found, boxes * torch.tensor([160, 96, 160, 96]), scores[..., 1:])


def test_ssd_of_a_grid_has_boxes_in_pixels() -> None:
    size_boxes = to_corners(pixel_boxes(1260).numpy())
    head = GraphHead((Output("a", (1260, 4)), Output("b", (1260, CLASSES), frozenset({"Sigmoid"}))), (192, 320))
    decoder = choose_decoder("auto", head, "detection", CLASSES, "model.onnx")
    boxes = decoder.decode([torch.from_numpy(size_boxes), draw(2, 1260, CLASSES)], (192, 320))[0]
    assert np.abs(boxes.numpy() * np.array([320, 192, 320, 192]) - size_boxes).max() < BOX_TOLERANCE_PX


@pytest.mark.parametrize("activation", ["", "Softmax", "LogSoftmax"])
def test_classifier_applies_softmax_once(activation: str) -> None:
    logits = draw(2, 5, low=-3, high=3)
    given = {"": logits, "Softmax": logits.softmax(1), "LogSoftmax": logits.log_softmax(1)}[activation]
    head = GraphHead((Output("out", (5,), frozenset({activation} - {""})),), SIZE)
    decoder = choose_decoder("auto", head, "classification", 5, "model.onnx")
    assert isinstance(decoder, Classifier)
    assert torch.allclose(decoder.logits([given]).softmax(1), logits.softmax(1), atol=1e-6)


def test_classifier_of_a_sigmoid_keeps_the_odds() -> None:
    probabilities = draw(2, 5)
    head = GraphHead((Output("out", (5, 1, 1), frozenset({"Sigmoid"})),), SIZE)
    decoder = choose_decoder("auto", head, None, None, "model.onnx")
    assert isinstance(decoder, Classifier)
    assert torch.allclose(decoder.logits([probabilities[:, :, None, None]]).sigmoid(), probabilities, atol=1e-6)


def test_top_k_that_was_cut_off_leaves_boxes_in_pixels() -> None:
    boxes, scores = torch.from_numpy(to_corners(pixel_boxes(CELLS).numpy())), draw(2, CELLS, CLASSES, seed=1)
    outputs = (Output("scores", (CELLS, CLASSES), frozenset({"Sigmoid"})), Output("boxes", (CELLS, 4)))
    head = GraphHead(outputs, SIZE, {}, Cut("TopK", "", ("scores", "boxes"), ("output0",)))
    decoder = choose_decoder("auto", head, "detection", CLASSES, "model.onnx")
    found = decoder.decode([scores, boxes], SIZE)
    assert decoder.name == "yolo-end2end" and decoder.nms_iou is None
    assert_equal((found[0] * torch.tensor([160, 96, 160, 96]), found[1]), boxes, scores)


def test_suppression_that_was_cut_off_leaves_scores_by_class() -> None:
    size, boxes = (320, 320), draw(1, 6300, 4)
    scores = draw(1, CLASSES, 6300, seed=1)
    outputs = (Output("boxes", (6300, 4)), Output("scores", (CLASSES, 6300), frozenset({"Sigmoid"})))
    cut = Cut("NonMaxSuppression", "", ("boxes", "scores"), ("selected",), {"center_point_box": 1})
    decoder = choose_decoder("ssd", GraphHead(outputs, size, {}, cut), "detection", CLASSES, "model.onnx")
    found = decoder.decode([boxes * 320, scores], size)
    assert_equal((found[0] * 320, found[1]), to_corners(boxes.numpy()) * 320, scores.transpose(1, 2))


def test_known_classes_are_those_of_torchvision() -> None:
    coco = RetinaNet_ResNet50_FPN_Weights.DEFAULT.meta["categories"]
    assert coco_names() == tuple(name for name in coco if name not in ("N/A", "__background__"))
    assert len(coco_numbers()) == len(coco)
    assert imagenet_names() == tuple(ResNet18_Weights.DEFAULT.meta["categories"])


@pytest.mark.parametrize("operator", ["NonZero", "NonMaxSuppression"])
def test_outputs_of_a_pyramids_levels_are_no_pair_of_boxes_and_scores(operator: str) -> None:
    parts = [(f"{name}{count}", (count, width)) for count in (256, 64) for name, width in (("s", CLASSES), ("b", 4))]
    outputs = tuple(Output(name, shape, frozenset({"Sigmoid"})) for name, shape in parts)
    head = GraphHead(outputs, SIZE, {}, Cut(operator, "", tuple(name for name, _ in parts), ("boxes",)))
    with pytest.raises(InputError, match="for detection"):
        choose_decoder("auto", head, "detection", CLASSES, "model.onnx")


def test_boxes_before_a_suppression_are_no_queries_of_a_detr() -> None:
    outputs = (Output("boxes", (300, 4)), Output("scores", (300, CLASSES), frozenset({"Sigmoid"})))
    cut = Cut("NonMaxSuppression", "", ("boxes", "scores"), ("selected",), {"iou_threshold": 0.5})
    decoder = choose_decoder("auto", GraphHead(outputs, SIZE, {}, cut), "detection", CLASSES, "model.onnx")
    assert decoder.name == "ssd" and decoder.nms_iou == 0.5


@pytest.mark.parametrize("order", ["sbe", "seb", "bse", "esb"])
@pytest.mark.parametrize("classes", [3, 4])
def test_parts_of_rotated_boxes_before_a_top_k_are_told_apart(order: str, classes: int) -> None:
    widths = {"s": classes, "b": 4, "e": 1}
    tail = frozenset({"Sigmoid", "Cos", "Sin"})
    outputs = tuple(Output(part, (CELLS, widths[part]), tail) for part in order)
    head = GraphHead(outputs, SIZE, {}, Cut("TopK", "", tuple(order), ("output0",)))
    decoder = choose_decoder("auto", head, "detection", classes, "model.onnx")
    assert isinstance(decoder, YoloObb) and decoder.width == classes and decoder.nms_iou is None
    assert classes == 4 or (decoder.scores, decoder.boxes) == (order.index("s"), order.index("b"))
    assert decoder.extras == order.index("e")
