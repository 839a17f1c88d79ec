"""The engine `onnx`: answers as torch's, weights shared in one mapping, memory given back and answers equal."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from gemel.edge_runtime.engines import mapped
from gemel.edge_runtime.engines.base import EngineError
from gemel.edge_runtime.engines.mapped import MappedEngine, OpenedWeights, open_sessions, page_store
from gemel.edge_runtime.engines.prepare import prepare_bundle
from gemel.edge_runtime.engines.prepared import PreparedBundle
from gemel.edge_runtime.engines.setup import held_bytes
from gemel.edge_runtime.life.box import cost_box, load_box
from gemel.edge_runtime.life.config import load_config
from gemel.edge_runtime.life.daemon import run
from gemel.edge_runtime.memory import pages
from gemel.edge_runtime.memory.page_memory import PageMemory, open_memory
from gemel.edge_runtime.scheduler.costs import all_bytes
from gemel.merger.computed import QueryNetwork
from gemel.models.bundle import Bundle, BundleQuery, Made, open_bundle, write_bundle
from gemel.models.errors import InputError
from gemel.models.export.export_document import export_documents
from gemel.models.preprocess import Preprocess
from gemel.models.quantization import PackedWeight
from gemel.models.workload import load_workload
from gemel.models.zoo import build_query
from tests.edge_runtime.engines.prepared_bundles import contents_read_by, copy_prepared, scale_content
from tests.edge_runtime.engines.sample_bundles import (
    ATTENDING,
    build_model,
    make_query,
    pack_weights,
    reference,
    write_and_open,
)
from tests.edge_runtime.tiny import SIZE, picture, query, tiny_bundle, trained_looking, write_box, write_config
from tests.models.graph.onnx_files import write_classifier

FIXED = "tests.edge_runtime.engines.test_mapped:Fixed"


class Fixed(nn.Module):
    """A forward that goes through its frames one by one, which no graph can for any batch."""

    def __init__(self, num_classes: int, input_size: int = 16) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 64, 3), nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, 16, 16) -> (N, C)."""
        return torch.cat([self.fc(self.conv(frame).relu().flatten(2).mean(2)) for frame in x.split([1] * len(x))])


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def use_cache(cache, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Bundle:
    return tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny.gemel", documents=True)


def engines_of(bundle: Bundle) -> dict[str, MappedEngine]:
    names = [one.id for one in bundle.queries]
    return {name: engine for group in open_sessions(bundle, names) for name, engine in group.items()}


def assert_answers_as_torch(bundle: Bundle, tolerance: float = 1e-4) -> dict[str, MappedEngine]:
    engines = engines_of(bundle)
    assert set(engines) == {one.id for one in bundle.queries}
    for name, engine in engines.items():
        for seed in (1, 2):
            expected, answer = reference(bundle, name, seed).numpy(), engine.outputs([picture(seed)])
            np.testing.assert_allclose(answer, expected, rtol=tolerance, atol=tolerance)
    return engines


def test_mapped_engines_answer_as_torch_and_share_one_mapping(tiny):
    engines = assert_answers_as_torch(tiny)
    assert engines["gate"].opened is engines["road"].opened
    several = engines["gate"].outputs([picture(1), picture(2)])
    np.testing.assert_allclose(several[1:], engines["gate"].outputs([picture(2)]), rtol=1e-5, atol=1e-5)
    assert held_bytes(engines.values()) == 0, "all are mapped"
    assert 0 < engines["gate"].workspace_of(1) <= engines["gate"].workspace_of(4)


def run_all(engines: dict[str, MappedEngine]) -> dict[str, np.ndarray]:
    return {name: engine.outputs([picture(3)]) for name, engine in engines.items()}


def test_a_changed_shared_weight_changes_every_query_that_reads_it(tiny, tmp_path):
    prepared = prepare_bundle(tiny)
    folder = copy_prepared(prepared, tmp_path / "copy")
    (shared,) = contents_read_by(prepared.index, "gate", "yard")
    opened = OpenedWeights(PreparedBundle(folder, prepared.index))
    engines = {name: MappedEngine(tiny, name, opened) for name in ("gate", "yard", "road")}
    before = run_all(engines)
    scale_content(folder, prepared.index, shared, 1.5)
    after = run_all(engines)
    assert not np.allclose(before["gate"], after["gate"]) and not np.allclose(before["yard"], after["yard"])
    assert np.array_equal(before["road"], after["road"])


def memory_of(engines: dict[str, MappedEngine]) -> PageMemory:
    sizes = {name: nbytes for engine in engines.values() for name, nbytes in engine.weights.items()}
    return open_memory(page_store(engines, sizes), sum(sizes.values()), "cpu")


def test_ranges_of_pages_are_apart_and_hold_what_their_queries_read(tiny):
    engines = engines_of(tiny)
    opened = engines["gate"].opened
    ends = 0
    for extent in sorted(opened.extents.values()):
        assert extent.offset % 4096 == extent.nbytes % 4096 == 0 and extent.offset >= ends
        ends = extent.end
    shared = set(engines["gate"].weights) & set(engines["yard"].weights)
    assert shared and not shared & set(engines["road"].weights)
    for name, engine in engines.items():
        held = [opened.extents[one] for one in engine.weights]
        for place in opened.prepared.index.queries[name].reads:
            content = opened.prepared.index.contents[place].extent
            pages = range(content.offset // 4096, -(-content.end // 4096))
            assert all(any(one.offset <= 4096 * page < one.end for one in held) for page in pages)


def test_evicted_ranges_leave_memory_and_answers_stay_the_same_to_the_bit(tiny):
    engines = engines_of(tiny)
    memory, weights = memory_of(engines), engines["gate"].opened.weights
    extents = engines["gate"].opened.extents
    memory.change((), [name for engine in engines.values() for name in engine.weights])
    before = run_all(engines)
    own = set(engines["gate"].weights) - set(engines["yard"].weights)
    memory.change(own, ())
    assert weights.resident_bytes(extents[name] for name in own) == 0
    assert weights.resident_bytes(extents[name] for name in engines["yard"].weights) > 0
    memory.close()
    assert weights.resident_bytes(extents.values()) == 0
    for name, answer in run_all(engines).items():
        assert np.array_equal(answer, before[name])


@pytest.mark.parametrize("bits", ["fp16", "int8", "int4"])
def test_packed_weights_answer_as_torch_unpacks_them(tmp_path, bits):
    models = {name: trained_looking(seed) for seed, name in enumerate(("one", "two"), 1)}
    with torch.no_grad():
        models["two"][3].weight.copy_(models["one"][3].weight)  # type: ignore[union-attr,operator]
    packed: dict[str, dict[str, PackedWeight]] = {
        name: pack_weights(model, bits, least=True) for name, model in models.items()
    }
    queries = [query(name, "left") for name in models]
    bundle = write_and_open(tmp_path / "b", models, queries, packed, documents=True)
    engines = assert_answers_as_torch(bundle)
    index = engines["one"].opened.prepared.index
    (shared,) = contents_read_by(index, "one", "two")
    widths = {"fp16": 4, "int8": 1, "int4": 0.5}
    assert index.contents[shared].nbytes == 9 * 12 * 48 * widths[bits], "codes stay packed and shared"


def test_networks_that_attend_answer_as_torch_with_blocks_that_were_saved(tmp_path):
    models = {"one": build_model(ATTENDING, 16), "two": build_model(ATTENDING, 16, seed=1)}
    with torch.no_grad():
        models["two"].mix.weight.copy_(models["one"].mix.weight)  # type: ignore[union-attr,operator]
    bundle = write_and_open(
        tmp_path / "b", models, [make_query(name, ATTENDING, 16) for name in models], documents=True
    )
    engines = assert_answers_as_torch(bundle)
    tensors = engines["one"].opened.prepared.index.queries["one"].tensors
    assert any(not one.is_bound for one in tensors), "ONNX Runtime maps what it has packed"
    before = run_all(engines)
    memory = memory_of(engines)
    memory.change((), [name for engine in engines.values() for name in engine.weights])
    memory.close()
    opened = engines["one"].opened
    assert opened.weights.resident_bytes(opened.extents.values()) == 0, "also what ONNX Runtime maps"
    for name, answer in run_all(engines).items():
        assert np.array_equal(answer, before[name])
    assert contents_read_by(engines["one"].opened.prepared.index, "one", "two")


def test_a_network_of_one_frame_runs_frame_by_frame(tmp_path):
    torch.manual_seed(0)
    bundle = write_and_open(tmp_path / "b", {"one": Fixed(3)}, [query("one", "left", model=FIXED)], documents=True)
    engines = assert_answers_as_torch(bundle)
    assert engines["one"]._session.query.batch == 1
    several = engines["one"].outputs([picture(1), picture(2)])
    assert np.array_equal(several[1:], engines["one"].outputs([picture(2)]))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["ssdlite320_mobilenet_v3_large", "fasterrcnn_mobilenet_v3_large_320_fpn"])
def test_detectors_answer_as_torch(tmp_path, model):
    models = {"one": build_model(model, 96)}
    bundle = write_and_open(tmp_path / "b", models, [make_query("one", model, 96)], documents=True)
    (engine,) = engines_of(bundle).values()
    network = bundle.build("one")
    batch = np.random.default_rng(0).standard_normal((1, 3, 96, 96), np.float32)
    with torch.inference_mode():
        outputs = network.export_outputs(torch.from_numpy(batch))  # type: ignore[operator]
    expected = [output.numpy() for output in outputs]
    answers = engine.forward(batch)
    assert len(answers) == len(expected) and answers[0].shape == expected[0].shape
    # What suppression inside a network leaves of drawn boxes jumps with the last bit of their scores.
    sure = slice(None) if engine._session.query.batch is None else expected[1] > 0.3
    np.testing.assert_allclose(answers[1][sure], expected[1][sure], rtol=1e-4, atol=1e-4)
    close = np.isclose(answers[0][sure], expected[0][sure], rtol=1e-4, atol=1e-4)
    assert close.mean() > (0.9 if engine._session.query.batch == 1 else 0.9999)


def test_networks_from_files_run_from_their_graphs(tmp_path):
    for index, name in enumerate(("gate", "yard")):
        write_classifier(tmp_path / f"{name}.onnx", index, scales=0.5)
    entries = [{"id": name, "camera": "one", "model": f"{name}.onnx"} for name in ("gate", "yard")]
    workload = {"name": "w", "cameras": {"one": {"source": "one.mp4"}}, "queries": entries}
    (tmp_path / "w.yaml").write_text(json.dumps(workload))
    queries = list(load_workload(tmp_path / "w.yaml").queries)
    models = {one.id: build_query(one) for one in queries}
    gate, yard = (model.get_submodule("network") for model in models.values())
    yard.body.weight = gate.body.weight  # type: ignore[union-attr]
    write_bundle(tmp_path / "b", models, [BundleQuery.of(one) for one in queries], Made("w", "none", 0))
    bundle = open_bundle(tmp_path / "b")
    engines = assert_answers_as_torch(bundle)
    assert contents_read_by(engines["gate"].opened.prepared.index, "gate", "yard")


def test_a_bundle_without_networks_is_an_engine_error(tmp_path):
    with pytest.raises(EngineError, match="holds no networks"):
        list(open_sessions(tiny_bundle(tmp_path / "old"), ["gate"]))


def test_a_device_that_it_lacks_is_an_engine_error(tiny):
    with pytest.raises(EngineError, match="does not run on cuda"):
        open_sessions(tiny, ["gate"], "cuda")


def test_a_box_serves_with_mapped_weights_by_its_config(tmp_path):
    write_box(tmp_path)
    tiny_bundle(tmp_path / "with-documents.gemel", documents=True)
    summary = run(write_config(tmp_path, bundle="with-documents.gemel", engine="onnx"))
    assert set(summary["engines"].values()) == {"onnx"} and summary["balanced"] and summary["fits"]
    assert 0 < summary["max_resident_bytes"] <= summary["max_used_bytes"] and summary["bytes_moved"] == 0
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {record["query"] for record in records} == {"gate", "yard", "road"}


def test_a_schedule_under_half_the_budget_gives_equal_answers_in_bounded_memory(tmp_path, monkeypatch):
    write_box(tmp_path)
    tiny_bundle(tmp_path / "mapped.gemel", documents=True)
    peaks = []
    plain = PageMemory.start

    def start(memory: PageMemory, *args, **options) -> bool:
        loaded = plain(memory, *args, **options)
        peaks.append(memory.store.weights.resident_bytes(memory.store.extents.values()))
        return loaded

    monkeypatch.setattr(PageMemory, "start", start)
    answers, summaries = [], []
    for part in (1, 2):
        ready = cost_box(load_box(load_config(write_config(tmp_path, bundle="mapped.gemel", engine="auto"))))
        costs = ready.whole
        budget = max(all_bytes(costs) // part, *map(costs.alone_bytes, costs.queries))
        peaks.clear()
        summaries.append(
            run(write_config(tmp_path, bundle="mapped.gemel", engine="auto", budget=budget, policy="gemel"))
        )
        records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
        answers.append({(one["query"], one["frame"]): (one["label"], one["score"]) for one in records})
    whole, half = summaries
    assert whole["fits"] and whole["swaps"] == 0
    assert not half["fits"] and half["swaps"] > 0 and half["bytes_moved"] > 0
    assert max(peaks) <= half["max_resident_bytes"] <= whole["max_resident_bytes"]
    assert half["max_used_bytes"] <= half["budget_bytes"]
    common = answers[0].keys() & answers[1].keys()
    assert common and all(answers[0][key] == answers[1][key] for key in common)


def test_memory_of_the_whole_process_leaves_weights_and_workspaces_the_rest(tmp_path):
    write_box(tmp_path)
    tiny_bundle(tmp_path / "mapped.gemel", documents=True)
    keys = {"bundle": "mapped.gemel", "engine": "auto", "budget": None}
    checked = run(write_config(tmp_path, memory="8GiB", **keys), check=True)
    base = checked["base_bytes"]
    assert 20 << 20 < base < 4 << 30 and checked["budget_bytes"] == (8 << 30) - base
    with pytest.raises(InputError, match=r"the process alone takes .*, without any weights; give more than"):
        run(write_config(tmp_path, memory="1MiB", **keys), check=True)
    with pytest.raises(InputError, match=r"alone needs .* of `memory` are the process itself; give at least"):
        run(write_config(tmp_path, memory=base + 1000, **keys), check=True)
    both = write_config(tmp_path, memory="8GiB", **{**keys, "budget": "1MiB"})
    assert run(both, check=True)["budget_bytes"] == 1 << 20
    with pytest.raises(InputError, match="says nothing of how much memory"):
        run(write_config(tmp_path, **keys), check=True)


BOUNDED = """
import sys
import numpy as np
from gemel.edge_runtime.engines.mapped import WorkspaceExceeded
from gemel.edge_runtime.engines.setup import EngineRequest, engines_for
from gemel.models.bundle import open_bundle
engines = engines_for(open_bundle(sys.argv[1]), "onnx", EngineRequest(max_workspace_bytes=1 << 20))
frame = np.zeros((32, 48, 3), np.uint8)
assert len(engines["gate"].outputs([frame])) == 1
try:
    engines["gate"].outputs([frame] * 400)
except WorkspaceExceeded as error:
    print(error)
print(len(engines["road"].outputs([frame])))
"""


def test_a_run_beyond_the_arena_fails_alone_with_a_reason(tiny):
    prepare_bundle(tiny)
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, str(tiny.path)], capture_output=True, text=True, check=False, cwd=Path.cwd()
    )
    assert done.stdout.splitlines() == [
        "a run of 400 frames takes more memory than the box may use for runs", "1",
    ], done.stderr  # fmt: skip


SHRUNK = """
import sys
import numpy as np
from gemel.edge_runtime.engines import mapped_session
from gemel.edge_runtime.engines.mapped import open_sessions
from gemel.models.bundle import open_bundle
from gemel.models.process import private_bytes
engines, frame = {}, np.zeros((16, 16, 3), np.uint8)
for opened in open_sessions(open_bundle(sys.argv[1]), ["gate"]):
    engines |= opened
engines["gate"].outputs([frame] * 2000)
before = private_bytes()
engines["gate"].outputs([frame])
kept = private_bytes()
mapped_session.SHRINK_INTERVAL_S = 0.0
engines["gate"].outputs([frame])
print(before, kept, private_bytes())
"""


def test_a_run_gives_back_now_and_then_what_larger_batches_took(tiny):
    prepare_bundle(tiny)
    done = subprocess.run(
        [sys.executable, "-c", SHRUNK, str(tiny.path)], capture_output=True, text=True, check=False, cwd=Path.cwd()
    )
    before, kept, shrunk = map(int, done.stdout.split())
    assert shrunk < kept - 10e6 and kept > before - 2e6, done.stderr


def test_a_file_system_without_mappings_is_an_engine_error(tiny, monkeypatch):
    prepare_bundle(tiny)

    def refuse(*args, **options):
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(mapped, "_opened", {})
    monkeypatch.setattr(pages, "mmap", SimpleNamespace(mmap=refuse, MAP_SHARED=1, PROT_READ=1, PAGESIZE=4096))
    with pytest.raises(EngineError, match=r"weights\.bin cannot be mapped: .*No such device"):
        list(open_sessions(tiny, ["gate"]))


def test_a_file_that_was_cut_short_under_a_box_fails_its_queries_with_the_remedy(tmp_path):
    write_box(tmp_path)
    bundle = tiny_bundle(tmp_path / "mapped.gemel", documents=True)
    prepared = prepare_bundle(bundle)
    folder = copy_prepared(prepared, tmp_path / "copy")
    opened = OpenedWeights(PreparedBundle(folder, prepared.index))
    memory = memory_of({name: MappedEngine(bundle, name, opened) for name in prepared.index.queries})
    os.truncate(folder / "weights.bin", 4096)
    with pytest.raises(OSError, match="start the box again to prepare it anew"):
        memory.change((), tuple(opened.extents))
    assert not memory.residency.resident, "nothing counts as loaded"


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_weights_computed_in_integers_stay_shared_and_answer_near_the_packed_ones(bits, tmp_path):
    models = {name: trained_looking(seed) for seed, name in enumerate(("one", "two"), 1)}
    with torch.no_grad():
        models["two"][3].weight.copy_(models["one"][3].weight)  # type: ignore[union-attr,operator]
    packed = {name: pack_weights(model, bits, least=True) for name, model in models.items()}
    queries = [query(name, "left") for name in models]
    prepare = Preprocess((SIZE, SIZE))
    pictures = np.stack([prepare.resize_frame(picture(seed)) for seed in range(1, 9)])
    frames = torch.from_numpy(prepare.normalise(pictures))
    documents = export_documents(models, queries)
    networks = {one.id: QueryNetwork(one, documents[one.id], models[one.id], packed[one.id]) for one in queries}
    computed = [dataclasses.replace(one, activations=networks[one.id].measure(frames)) for one in queries]
    wide = engines_of(write_and_open(tmp_path / "a", models, queries, packed, documents=True))
    bundle = write_and_open(tmp_path / "b", models, computed, packed, documents=True)
    engines = engines_of(bundle)
    prepared = engines["one"].opened.prepared
    index = prepared.index
    operators = [node.op_type for node in onnx.load(prepared.folder / index.queries["one"].file).graph.node]
    assert operators.count("QLinearConv") == 2
    (shared,) = contents_read_by(index, "one", "two")
    assert index.contents[shared].nbytes == 9 * 12 * 48, "codes stay shared, each norm is in its query's scales"
    for name, engine in engines.items():
        expected, answer = (torch.as_tensor(one.outputs([picture(1)])) for one in (wide[name], engine))
        assert 0 < float((answer - expected).abs().max()) < 0.1 * float(expected.abs().max())
