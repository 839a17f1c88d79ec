"""What is public: listed in one place, light to import, and all that the commands can do."""

import logging
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import gemel
from gemel.api import _show, in_python, plan
from gemel.models.bundle import BundleQuery, Made, write_bundle
from gemel.models.notes import add_note, collect_notes
from gemel.models.workload import load_workload
from gemel.models.zoo import build_query
from tests.models.graph.onnx_files import write_classifier

ROOT = Path(__file__).resolve().parents[2]
WORKLOAD = """
name: two
cameras: {gate: {source: gate.mp4, fps: 5}}
queries:
  - {id: a, camera: gate, task: classification, classes: [x, y], model: cifar_resnet20, input_size: 32,
     roi: [8, 4, 40, 28], frame_size: [64, 48]}
  - {id: b, camera: gate, task: classification, classes: [x, y, z], model: cifar_resnet20, input_size: 32}
"""


@pytest.fixture
def workload(tmp_path):
    path = tmp_path / "workload.yaml"
    path.write_text(WORKLOAD)
    return path


@pytest.fixture
def bundle(workload, tmp_path):
    load = load_workload(workload)
    torch.manual_seed(0)
    models = {query.id: build_query(query).eval() for query in load.queries}
    records = [BundleQuery.of(query) for query in load.queries]
    write_bundle(tmp_path / "b.safetensors", models, records, Made("two", "none", 0))
    return tmp_path / "b.safetensors"


def python(script, cwd=ROOT):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *script], cwd=cwd, capture_output=True, text=True, check=False, env=env)


def test_importing_gemel_imports_nothing_else():
    script = (
        "import sys, gemel\nassert set(gemel.__all__) <= set(dir(gemel))\n"
        "print([name for name in ('torch', 'numpy', 'pydantic', 'gemel.models') if name in sys.modules])"
    )
    done = python(["-c", script])
    assert done.stdout.strip() == "[]", done.stderr


def test_api_public_names_are_documented():
    for name in gemel.__all__:
        assert getattr(gemel, name).__name__ == name and f"`{name}" in (gemel.__doc__ or ""), name
    assert gemel.__all__ == sorted(gemel.__all__)
    with pytest.raises(AttributeError, match="no attribute 'mrege'"):
        gemel.mrege  # noqa: B018


def test_three_lines_give_a_merged_model_with_its_preprocessing(bundle):
    opened = gemel.open_bundle(bundle)
    model = opened.build("a")
    frame = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
    answer = model(model.preprocess(frame))  # type: ignore[operator]
    assert isinstance(model, nn.Module) and not model.training and answer.shape == (1, 2)
    prepare = opened.query("a").preprocess
    part = torch.from_numpy(prepare(frame[4:28, 8:40]))
    assert torch.allclose(answer, model(part), rtol=1e-4), "the part of the frame that the query looks at"
    assert opened.build("b").preprocess(frame).shape == (1, 3, 32, 32)  # type: ignore[operator]


def test_three_lines_write_it_as_onnx(bundle, tmp_path):
    written = gemel.export(bundle, "a", tmp_path / "a.onnx")
    assert "gemel.classes" in written.metadata and "gemel.classes" not in repr(written), "a repr is a line"
    session = onnxruntime.InferenceSession(written.path, providers=["CPUExecutionProvider"])
    model = gemel.open_bundle(bundle).build("a")
    batch = model.preprocess(np.full((48, 64, 3), 90, np.uint8))  # type: ignore[operator]
    logits = np.asarray(session.run(None, {"frames": batch.numpy()})[0])
    assert np.allclose(logits, model(batch).detach().numpy(), atol=1e-4)


def test_api_code_of_the_guide_runs(bundle, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "guide.md").read_text().split("## Python")[1]
    page = page.replace("box.safetensors", bundle.name).replace("bridge-vehicles", "a")
    build, load, export, _ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert all(len([line for line in block.splitlines() if line]) == 3 for block in (build, load, export))
    names = {"frame": np.full((48, 64, 3), 90, np.uint8)}
    write_classifier(tmp_path / "best.onnx")
    exec(load, names)
    assert names["found"].label in names["model"].classes  # type: ignore[attr-defined]
    exec(build, names)
    assert names["answer"].shape == (1, 2)  # type: ignore[attr-defined]
    exec(export, names)
    assert (tmp_path / "bridge.onnx").exists() and "frames" in capsys.readouterr().out


def test_api_workload_is_a_path_or_a_value(workload, bundle):
    by_path, by_value = gemel.inspect(str(workload)), gemel.inspect(gemel.load_workload(workload))
    assert by_path == by_value and by_path.ceiling_fraction > 0.4
    planned = gemel.plan(bundle, gemel.Conditions(memory="all"))
    assert planned.fits and planned == gemel.plan(bundle, gemel.Conditions(memory="all", device="orin-nano-8gb"))
    assert gemel.simulate(workload, duration_s=2.0).simulation.per_query()[0]["received"] > 0
    assert gemel.verify(bundle) == []
    with pytest.raises(gemel.InputError, match="cannot be read"):
        gemel.open_bundle(workload.parent / "absent.safetensors")
    with pytest.raises(gemel.BundleError):
        gemel.open_bundle(workload)


SCRIPT = "import sys; sys.path.pop(0)\nfrom gemel.cli import main; sys.exit(main(['inspect', 'workload.yaml']))"


@pytest.mark.parametrize(
    ("own", "command"),
    [("models.py", ["-m", "gemel", "inspect", "workload.yaml"]), ("models/__init__.py", ["-c", SCRIPT])],
    ids=["module", "script"],
)
def test_api_user_file_models_py_is_no_obstacle(workload, own, command):
    file = workload.parent / own
    file.parent.mkdir(exist_ok=True)
    file.write_text("raise SystemExit('imported')")
    done = python(command, workload.parent)
    assert done.returncode == 0 and "in groups" in done.stdout, done.stderr


OWN_MODELS = {
    "models.py": "import gemel\nimport models\nfrom models import Net\nassert models.Net is Net",
    "models/__init__.py": "import models\nfrom models import Net\nimport gemel\nassert models.Net is Net",
    "models/other.py": "import gemel\nNet = 3",
}


@pytest.mark.parametrize("file", OWN_MODELS)
def test_api_works_beside_a_users_own_models(tmp_path, file):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("Net = 3")
    end = "from gemel.models.workload import Query\nassert gemel.Query is Query and Net == 3 and gemel.merge"
    (tmp_path / "script.py").write_text(f"{OWN_MODELS[file]}\n{end}")
    done = python(["script.py"], tmp_path)
    assert done.returncode == 0, done.stderr


def test_api_factory_in_own_package_is_named(workload, capsys):
    from gemel.cli import main

    workload.write_text(WORKLOAD.replace("model: cifar_resnet20", "model: models:net", 1))
    assert main(["inspect", str(workload)]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "models has no 'net'" in said


def test_api_replaces_a_bundle_only_by_a_whole_one(tmp_path):
    path = tmp_path / "one.onnx"
    write_classifier(path)
    assert "sessions of ONNX Runtime" in repr(gemel.pack([path], tmp_path / "box.safetensors"))
    with pytest.raises(gemel.InputError, match="exists already; give overwrite=True"):
        gemel.pack([path], tmp_path / "box.safetensors")
    before = (tmp_path / "box.safetensors").read_bytes()
    with pytest.raises(gemel.InputError, match="is given twice"):
        gemel.pack([path, path], tmp_path / "box.safetensors", overwrite=True)
    assert (tmp_path / "box.safetensors").read_bytes() == before
    gemel.pack([path], tmp_path / "box.safetensors", overwrite=True)
    assert not list(tmp_path.glob(".*.before"))


def test_api_within_a_command_leaves_notes_to_it(monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with collect_notes() as notes, _show(None):
        add_note("a.onnx", "has no names")
    assert notes == ["a.onnx: has no names"] and capsys.readouterr().err == ""


def test_api_shows_notes_always_and_a_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with _show("auto") as shown:
        shown("stages", names=["one"])
        add_note("a.onnx", "has no names")
        add_note("a.onnx", "has no names")
    assert capsys.readouterr().err == "note: a.onnx: has no names\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with _show("auto") as shown:
        shown("stage", name="counting sheep")
    assert "counting sheep" in capsys.readouterr().err


def test_api_errors_and_notes_name_arguments_not_options(workload, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    wrong = {
        "memory: 'lots'": lambda: gemel.plan(workload, gemel.Conditions(memory="lots")),
        "device: ": lambda: gemel.simulate(workload, gemel.Conditions(device="moon")),
        "method: ": lambda: gemel.merge(workload, tmp_path / "b.safetensors", method="nope"),
    }
    for text, call in wrong.items():
        with pytest.raises(gemel.InputError) as caught:
            call()
        assert str(caught.value).startswith(text) and "--" not in str(caught.value)
    with pytest.raises(gemel.InputError, match=r"^--memory: "):
        plan(workload, gemel.Conditions(memory="lots"))  # what the command calls
    assert in_python("give --max-minutes or `--from DIR`: /x--y/--z") == "give max_minutes or `before DIR`: /x--y/--z"
    capsys.readouterr()
    with _show(None):
        add_note("a", "is not proven", "give --accept-unproven")
    assert capsys.readouterr().err == "note: a: is not proven; give accept_unproven=True\n"


def test_api_says_its_version_and_its_types(workload):
    assert gemel.__version__ == metadata.version("gemel") and (ROOT / "gemel" / "py.typed").is_file()
    assert {"merge", "__version__"} <= set(dir(gemel)) and not {"Any", "importlib"} & set(dir(gemel))
    assert gemel.load_model.__annotations__["return"] == "FrameModel", "which has preprocess, classes and predict"
    assert repr(gemel.inspect(workload)) == gemel.inspect(workload).to_text()
    assert len(repr(gemel.plan(workload))) < 2000
