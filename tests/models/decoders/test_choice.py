"""Which decoder a file gets, which of its classes a query means, and what is refused."""

import pytest

from models.decoders import choose_columns, choose_decoder, coco_names
from models.decoders.detr import Detr
from models.decoders.registry import GraphHead, Output, class_names, parse
from models.decoders.yolo import Yolo
from models.decoders.yolox import Yolox
from models.errors import InputError

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
        ([(84, 2100)], {"name": "yolos"}, r"there is no decoder 'yolos'; use auto or one of yolo"),
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


def test_metadata_with_gaps_name_no_classes() -> None:
    assert class_names({"names": "{0: 'a', 2: 'b'}"}) is None
    assert class_names({"names": "[1, 2]"}) is None


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
        (3, {}, ["cat", "dog"], "answers with 3 classes, which it does not name, where 2 were asked for"),
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
