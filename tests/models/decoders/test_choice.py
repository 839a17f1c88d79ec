"""Which decoder a file gets, which of its classes a query means, and what is refused."""

import numpy as np
import pytest

from gemel.models.decoders import choose_columns, choose_decoder, coco_names
from gemel.models.decoders.classifier import Classifier
from gemel.models.decoders.decoder import GraphHead, Output, class_names
from gemel.models.decoders.detr import Detr
from gemel.models.decoders.yolo import Yolo
from gemel.models.decoders.yolox import Yolox
from gemel.models.errors import InputError
from gemel.models.labels.class_names import parse

SIZE = (320, 320)
ULTRALYTICS = {
    "description": "Ultralytics YOLOv8n model trained on signs.yaml", "task": "detect", "stride": "32",
    "imgsz": "[320, 320]", "names": "{0: 'stop', 1: 'give way', 2: \"driver's door\"}",
}  # fmt: skip


def choose(
    *shapes: tuple[int, ...], name: str = "auto", task: str | None = "detection", count: int | None = None, **metadata
):
    outputs = tuple(Output(f"output{index}", shape) for index, shape in enumerate(shapes))
    return choose_decoder(name, GraphHead(outputs, SIZE, metadata), task, count, "signs.onnx")


@pytest.mark.parametrize(
    ("shapes", "name"),
    [
        ([(84, 2100)], "yolo"),
        ([(84, 500)], "yolo"),
        ([(6300, 85)], "yolov5"),
        ([(2100, 85)], "yolox"),
        ([(2100, 112)], "nanodet"),
        ([(300, 6)], "yolo-end2end"),
        ([(300, 80), (300, 4)], "detr"),
        ([(85, 20, 20)], "fastestdet"),
    ],
)
def test_outputs_alone_tell_the_decoder_of_80_classes(shapes: list[tuple[int, ...]], name: str) -> None:
    decoder = choose(*shapes)
    assert (decoder.name, decoder.width) == (name, 80)


def test_names_of_the_file_tell_layouts_apart() -> None:
    assert choose((2100, 8), names="['a', 'b', 'c']").name == "yolox"
    assert choose((2100, 7), names="['a', 'b', 'c']").name == "yolo"


def test_six_columns_of_every_cell_are_one_or_two_classes() -> None:
    assert choose((2100, 6), names="['car']").name == "yolox"
    assert choose((2100, 6), names="['car', 'bus']").name == "yolo"


def test_six_columns_beside_boxes_are_scores() -> None:
    assert isinstance(choose((300, 4), (300, 6), names=str([f"kind {index}" for index in range(6)])), Detr)
    assert choose((300, 4), (300, 6)).name == "detr"


def test_number_of_classes_asked_for_tells_layouts_apart() -> None:
    assert isinstance(choose((2100, 8), count=3), Yolox)
    assert isinstance(choose((2100, 8), count=4), Yolo)
    sigmoid, softmax = choose((30, 6), (30, 4), count=6), choose((30, 6), (30, 4), count=5)
    assert isinstance(sigmoid, Detr) and (sigmoid.width, sigmoid.activation) == (6, "sigmoid")
    assert isinstance(softmax, Detr) and (softmax.width, softmax.activation) == (5, "softmax"), "and no object"


@pytest.mark.parametrize(
    ("shapes", "keys", "problem"),
    [
        ([(2100, 8)], {}, r"fit several decoders: yolo, yolox; name one as `decoder`"),
        ([(17,)], {}, r"no decoder for detection fits the outputs output0 \[17\]"),
        ([(84, 2100)], {"name": "detr"}, r"the decoder detr does not fit the outputs output0 \[84, 2100\]"),
        ([(84, 2100)], {"name": "yolos"}, r"there is no decoder 'yolos'; choose one of: auto, classifier"),
        ([], {}, r"has no outputs"),
    ],
)
def test_outputs_that_nothing_explains_are_refused(shapes, keys, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        choose(*shapes, **keys)


def test_metadata_of_ultralytics_are_python_literals() -> None:
    assert class_names(ULTRALYTICS) == ("stop", "give way", "driver's door")
    assert parse(ULTRALYTICS["imgsz"]) == [320, 320]
    assert parse("__import__('os').system('true')") is None and parse("(" * 5000) is None


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("names", "['a', 'b', 'c']"),
        ("names", "a,b,c"),
        ("names", "a\nb\nc\n"),
        ("class_names", "a; b; c"),
        ("id2label", '{"0": "a", "1": "b", "2": "c"}'),
        ("class_to_idx", '{"c": 2, "a": 0, "b": 1}'),
        ("labels", "('a', 'b', 'c')"),
    ],
)
def test_class_names_of_any_form_are_in_the_order_of_columns(key: str, text: str) -> None:
    assert class_names({key: text}) == ("a", "b", "c")


def test_class_names_with_a_gap_leave_an_unused_column() -> None:
    assert class_names({"names": "{0: 'a', 2: 'b'}"}) == ("a", "unused 1", "b")


@pytest.mark.parametrize("text", ["[1, 2]", "{broken", "{0: 'a', 0.5: 'b'}", "{'a': 0, 'b': 0}", "[]]"])
def test_choose_columns_where_names_are_unread_refuses_cocos(text: str) -> None:
    with pytest.raises(InputError, match=r"a form that is not read \(`names`\); name all 80"):
        choose_columns(Yolo(80), {"names": text}, ["person"], "signs.onnx")


@pytest.mark.parametrize("names", ["['car', 'bus']", "{0: 'car', 2: 'bus'}", "car,bus"])
def test_choose_columns_where_names_are_too_few_refuses_them(names: str) -> None:
    with pytest.raises(InputError, match=r"names [23] classes \(`names`\) and answers with 80 classes; name all 80"):
        choose_columns(Yolo(80), {"names": names}, ["car"], "signs.onnx")


def test_choose_columns_of_a_name_twice_asks_which() -> None:
    twice = {"names": "{0: 'red', 1: 'green', 2: 'green'}"}
    assert choose_columns(Yolo(3), twice, ["red", "green (2)"], "signs.onnx") == (0, 2)
    with pytest.raises(InputError, match=r"has 2 outputs of the same name 'green'; ask for green \(1\), green \(2\)"):
        choose_columns(Yolo(3), twice, ["red", "green"], "signs.onnx")


def test_columns_follow_the_names_of_the_file() -> None:
    assert choose_columns(Yolo(3), ULTRALYTICS, ["driver's door", "stop"], "signs.onnx") == (2, 0)


def test_columns_of_80_nameless_classes_are_those_of_coco() -> None:
    assert len(coco_names()) == 80
    assert choose_columns(Yolo(80), {}, ["person", "toothbrush"], "signs.onnx") == (0, 79)
    assert choose_columns(Yolo(91), {}, ["person", "toothbrush"], "signs.onnx") == (1, 90)


def test_columns_of_a_nameless_file_are_those_given() -> None:
    assert choose_columns(Yolo(2), {}, ["cat", "dog"], "signs.onnx") == (0, 1)


@pytest.mark.parametrize(
    ("width", "metadata", "classes", "problem"),
    [
        (3, ULTRALYTICS, ["stopp"], "has no class 'stopp'; its classes are stop"),
        (80, {}, ["gate"], "has no class 'gate'"),
        (3, {}, ["cat", "dog"], "answers with 3 classes which it does not name, where 2 were asked for"),
    ],
)
def test_classes_that_the_file_lacks_are_refused(width: int, metadata: dict, classes: list[str], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        choose_columns(Yolo(width), metadata, classes, "signs.onnx")


@pytest.mark.parametrize(
    ("metadata", "resize", "anchor"),
    [
        ({}, "letterbox", "centre"),
        ({"model_family": "yolo9"}, "letterbox", "top-left"),
        ({"model_family": "yolo9", "letterbox_pad": "center"}, "letterbox", "centre"),
        ({"model_family": "picodet"}, "stretch", "centre"),
    ],
)
def test_frames_of_yolo_are_prepared_as_the_metadata_say(metadata: dict, resize: str, anchor: str) -> None:
    found = Yolo(80).preprocess(metadata, SIZE)
    assert found is not None and (found.resize, found.anchor) == (resize, anchor)


def test_frames_of_an_unknown_family_have_no_default() -> None:
    assert Yolo(80).preprocess({"model_family": "yolo99"}, SIZE) is None


def choose_classifier(*outputs: Output, count: int | None = None, **metadata: str) -> Classifier:
    found = choose_decoder("auto", GraphHead(outputs, SIZE, metadata), "classification", count, "door.onnx")
    assert isinstance(found, Classifier)
    return found


@pytest.mark.parametrize(
    "outputs",
    [
        (Output("aux_logits", (5,), depth=50), Output("logits", (5,), depth=90)),
        (Output("a", (5,), depth=40), Output("b", (5,), depth=90)),
        (Output("odds", (5,), frozenset({"Softmax"}), sources=frozenset("h"), depth=91),
         Output("logits", (5,), sources=frozenset("h"), depth=90)),
    ],
    ids=["named", "branched off earlier", "softmax of the other"],
)  # fmt: skip
def test_choose_decoder_of_several_heads_takes_the_main_one(outputs: tuple[Output, ...]) -> None:
    assert outputs[choose_classifier(*outputs).index].depth >= 90


def test_choose_decoder_of_several_tasks_asks_which_one_counts() -> None:
    heads = Output("age", (5,), depth=90), Output("gender", (2,), depth=91)
    assert choose_classifier(*heads, count=2).index == 1
    with pytest.raises(InputError, match=r"several outputs that may be its classes: gender \[2\], age \[5\]; name all"):
        choose_classifier(*heads)
    with pytest.raises(InputError, match=r"gender \[2\], smile \[2\]; export it with the one that counts alone"):
        choose_classifier(heads[1], Output("smile", (2,), depth=91))


@pytest.mark.parametrize("activation", ["", "Sigmoid"])
def test_classifier_of_one_value_has_two_classes(activation: str) -> None:
    output = Output("y", (1,), frozenset({activation} - {""}))
    found = choose_classifier(output, count=2)
    values = np.array([[0.25], [-2.0]], np.float32)
    given = 1 / (1 + np.exp(-values)) if activation else values
    logits = found.logits([given])
    np.testing.assert_allclose(logits[:, 1] - logits[:, 0], values[:, 0], rtol=1e-5)
    with pytest.raises(InputError, match=r"2 classes by one value \(that of the second\) which it does not name"):
        choose_columns(found, {}, ["a", "b", "c"], "door.onnx")
