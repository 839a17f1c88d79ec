"""Labels that nothing can be judged by, and boxes that are handed over to other tools."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from gemel import stream_eval as arms
from gemel.coco_export import export_coco
from gemel.evaluation import QueryEvaluation, check_boxes
from gemel.stream_eval import MERGED, ORIGINALS, Footage
from models.data import Split
from models.errors import InputError
from models.metrics import mean_average_precision
from models.predictions import Boxes, DetectionPrediction
from models.workload import Query

QUERY = Query(
    "q", "cam", "detection", ("car", "bus"), "m", {}, 32, None, None, 5, 100, None, 0.0, 1, Path("data"), 0.95
)
HERE = (5.0, 5.0, 30.0, 30.0)


@pytest.mark.parametrize(
    ("truths", "fault"),
    [
        (
            [Boxes(), Boxes()],
            "data/test: data: no frame of the test split shows car or bus .query q.: nothing to score",
        ),
        (
            [Boxes(("car",), ((5.0, 5.0, 5.0, 9.0),))],
            r"the box \[5.0, 5.0, 0.0, 4.0\] of 'car' in frame 0 .* has no area",
        ),
        (
            [Boxes(("car",), (HERE,)), Boxes(("bus",), ((60.0, 5.0, 70.0, 9.0),))],
            "frame 1 .* outside its 60 x 40 pixels",
        ),
        ([Boxes(("bus",), ((-9.0, 5.0, 0.0, 9.0),))], "outside its 60 x 40 pixels"),
    ],
)
def test_labels_that_nothing_can_be_judged_by_are_refused_by_name(truths, fault):
    with pytest.raises(InputError, match=fault) as caught:
        check_boxes(QUERY, truths, [(60, 40)] * len(truths))
    assert "\n" not in str(caught.value)


def test_a_box_that_reaches_over_the_edge_is_none_of_them():
    check_boxes(QUERY, [Boxes(("car",), ((-3.0, 30.0, 70.0, 44.0),))], [(60, 40)])


def _judged() -> QueryEvaluation:
    frames = [np.full((40, 60, 3), 90, np.uint8)] * 3
    truths = (Boxes(("car",), (HERE,)), Boxes(), Boxes(("bus", "car"), (HERE, (40.0, 5.0, 55.0, 20.0))))
    split = Split("test", frames, truths, ("u", "u", "v"), (0.0, 1.0, 0.0))
    good = [DetectionPrediction(one.classes, (0.9,) * len(one.boxes), one.boxes) for one in truths]
    worse = [good[0], DetectionPrediction(("car",), (0.4,), (HERE,)), DetectionPrediction(("bus",), (0.8,), (HERE,))]
    tested = arms.QueryTest(
        QUERY, Footage(split.units, split.times_s, 5), truths, 0.5, {ORIGINALS: good, MERGED: worse}
    )
    return QueryEvaluation(tested, cast(Any, None), {}, split, 0, [], [])


def test_pycocotools_reads_what_is_handed_over_and_finds_the_same_map(tmp_path, capsys):
    coco = pytest.importorskip("pycocotools.coco", reason="pycocotools is not installed")
    cocoeval = pytest.importorskip("pycocotools.cocoeval")
    judged = _judged()
    export_coco([judged], tmp_path / "new")
    truth = coco.COCO(str(tmp_path / "new" / "q" / "labels.json"))
    for name, arm in (("original", ORIGINALS), ("merged", MERGED)):
        found = cocoeval.COCOeval(truth, truth.loadRes(str(tmp_path / "new" / "q" / f"{name}.json")), "bbox")
        found.evaluate()
        found.accumulate()
        found.summarize()
        ours = mean_average_precision(judged.tested.answers[arm], judged.tested.truths, QUERY.classes)  # type: ignore[arg-type]
        assert ours["map"] == pytest.approx(found.stats[0], abs=1e-6)
    images = json.loads((tmp_path / "new" / "q" / "labels.json").read_text())["images"]
    assert [(one["unit"], one["width"], one["height"]) for one in images] == [
        ("u", 60, 40),
        ("u", 60, 40),
        ("v", 60, 40),
    ]
    assert all((tmp_path / "new" / "q" / "data" / one["file_name"]).is_file() for one in images)


def test_what_cannot_be_handed_over_whole_leaves_nothing(tmp_path, monkeypatch):
    from gemel import coco_export as handing

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(handing, "_results", full)
    with pytest.raises(InputError, match="--fiftyone: cannot be written: No space left on device"):
        export_coco([_judged()], tmp_path / "new")
    assert not (tmp_path / "new").exists()
