"""A joint pass: outputs equal those of separate runs, tied layers run once, a bad frame fails its own query alone."""

from __future__ import annotations

import copy
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import gemel.models.zoo  # noqa: F401 (registers the architectures)
from gemel.edge_runtime.engines.base import runs_jointly
from gemel.edge_runtime.engines.joint_pass import JointPass, JointPassError, Member
from gemel.edge_runtime.engines.joint_run import JointRunner
from gemel.edge_runtime.engines.torch_engine import TorchEngine
from gemel.models.bundle import Made, StoredTensor, open_bundle, write_bundle
from gemel.models.graph.unfold import ChannelAffine
from gemel.models.predictions import ClassPrediction
from gemel.models.sharing.passes import MIN_TIED_SHARE, joint_queries
from gemel.models.zoo.registry import ENTRIES, names
from tests.edge_runtime.engines.sample_bundles import bind
from tests.edge_runtime.tiny import FACTORY, net, picture, query, trained_looking

JOBS = ([(0, [0]), (1, [1, 2])], [(0, [0]), (1, [0])], [(1, [0, 1]), (0, [1, 2])])
"""Frames of two cameras, one frame of one camera, and frames of which one is common."""
QUICK = ["mobilenet_v3_small", "resnet18", "shufflenet_v2_x0_5", "ssdlite320_mobilenet_v3_large"]
SIZES = {"fasterrcnn": 160, "keypointrcnn": 160, "ssd300": 300, "inception": 128, "vit": 224}
CLOSE, CLOSE_REGIONS, MAX_MOVED_SHARE = 1e-4, 2e-3, 0.05
"""The order in which a detector of two stages keeps regions of nearly equal scores depends on rounding."""


def is_private(key: str, tensor: torch.Tensor) -> bool:
    """Norms, biases, heads and every sixth layer."""
    layer = zlib.crc32(key.rpartition(".")[0].encode())
    return tensor.dim() <= 1 or key.startswith(("fc", "classifier", "head")) or layer % 6 == 0


def vary(model: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                noise = 1 + 0.2 * (torch.rand(tensor.shape, generator=generator) - 0.5)
                tensor.copy_(tensor * noise if tensor.dim() > 1 or "running_var" in key else tensor + noise - 1)
    return model.eval()


def make_members(model: nn.Module, count: int = 2) -> list[Member]:
    """Modules that tie what is not private."""
    made = [vary(copy.deepcopy(model), seed) for seed in range(1, count + 1)]
    first = made[0].state_dict()
    members = []
    for index, module in enumerate(made):
        own = {key: f"{key}@{index}" if is_private(key, tensor) else key for key, tensor in first.items()}
        module.load_state_dict({key: first[key] for key in own if own[key] == key}, strict=False)
        members.append(Member(module, own))
    return members


def largest_difference(members, batch, jobs, joint=None):
    with torch.inference_mode():
        expected = pytree.tree_leaves([members[index].model(batch[list(rows)]) for index, rows in jobs])
        found = pytree.tree_leaves((joint or JointPass(members))(batch, jobs))
    assert [one.shape for one in found] == [one.shape for one in expected]
    pairs = [(one.float(), other.float()) for one, other in zip(found, expected) if one.numel()]
    differences = [(one - other).abs().flatten() / (other.abs().max() + 1e-9) for one, other in pairs]
    if hasattr(members[0].model, "region_frames"):
        differences = [one.sort().values[: int((1 - MAX_MOVED_SHARE) * len(one))] for one in differences]
    return max(float(one.max()) for one in differences if len(one))


def check_family(name: str) -> None:
    entry = ENTRIES[name]
    size = next((size for prefix, size in SIZES.items() if name.startswith(prefix)), 64)
    torch.manual_seed(0)
    members = make_members(entry.factory(min(entry.width, 10), size))
    batch = torch.rand(3, 3, size, size).contiguous(memory_format=torch.channels_last)
    for jobs in JOBS:
        used = batch[: 1 + max(row for _, rows in jobs for row in rows)]
        close = CLOSE_REGIONS if hasattr(members[0].model, "region_frames") else CLOSE
        assert largest_difference(members, used, jobs) < close


@pytest.mark.parametrize("name", QUICK)
def test_joint_pass_of_zoo_family_equals_separate_runs(name):
    check_family(name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in names() if name not in QUICK])
def test_joint_pass_of_every_zoo_family_equals_separate_runs(name):
    check_family(name)


def test_joint_pass_of_imported_affines_equals_separate_runs():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), ChannelAffine(8), nn.ReLU(), nn.Conv2d(8, 8, 3), ChannelAffine(8))
    members, batch = make_members(model, 3), torch.rand(3, 3, 12, 12)
    assert largest_difference(members, batch, [(2, [0]), (0, [1, 2]), (1, [0])]) < CLOSE


def test_joint_pass_of_heads_with_other_widths_equals_separate_runs():
    members = make_members(net(3))
    members[1].model.set_submodule("8", nn.Linear(48, 5))
    members = [Member(one.model, {**one.names, "8.weight": f"head{index}"}) for index, one in enumerate(members)]
    assert largest_difference(members, torch.rand(2, 3, 16, 16), [(0, [0]), (1, [1])]) < CLOSE


def test_joint_pass_runs_tied_layers_once_and_common_prefix_by_frame():
    members = make_members(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)))
    tied = {key: key for key in members[0].names if key.startswith(("0.", "2."))}
    members = [Member(one.model, {**one.names, **tied}) for one in members]
    members[1].model.load_state_dict({key: members[0].model.state_dict()[key] for key in tied}, strict=False)
    seen = []
    for member in members:
        member.model.get_submodule("2").register_forward_hook(lambda module, given, found: seen.append(len(found)))
    assert largest_difference(members, torch.rand(1, 3, 8, 8), [(0, [0]), (1, [0])]) < CLOSE
    assert seen[2:] == [1]
    assert largest_difference(members, torch.rand(2, 3, 8, 8), [(0, [0]), (1, [1])]) < CLOSE
    assert seen[-1] == 2


def test_joint_pass_goes_on_together_where_some_queries_leave_the_prefix():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 3))
    members, tied = make_members(model, 3), [("0.", "1.", "3."), ("0.", "1.", "3."), ("0.",)]
    own = [{key: key if key.startswith(prefix) else f"{key}@{index}" for key in members[0].names}
           for index, prefix in enumerate(tied)]  # fmt: skip
    first = members[0].model.state_dict()
    for member, tensors in zip(members, own):
        member.model.load_state_dict({key: first[key] for key, name in tensors.items() if key == name}, strict=False)
    members, seen = [Member(one.model, tensors) for one, tensors in zip(members, own)], []
    for path in ("0", "2", "4"):
        members[0].model.get_submodule(path).register_forward_hook(lambda *given: seen.append(len(given[2])))
    assert largest_difference(members, torch.rand(2, 3, 9, 9), [(0, [0]), (1, [1, 0]), (2, [0, 1])]) < CLOSE
    assert largest_difference(members, torch.rand(1, 3, 9, 9), [(0, [0]), (1, [0]), (2, [0])]) < CLOSE
    assert seen[-3:] == [1, 2, 3]


class CountsFrames(nn.Module):
    """Reads the number of its frames before a private layer changes it."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 2)

    def forward(self, x):
        count = len(x)
        return self.head(torch.relu(self.first(x)).reshape(count, -1))


def test_joint_pass_whose_module_counts_frames_expands_them_first():
    members = make_members(CountsFrames())
    joint = JointPass([Member(one.model, {**one.names, "first.weight": f"w{index}"}) for index, one in
                       enumerate(members)])  # fmt: skip
    assert largest_difference(members, torch.rand(1, 3, 8, 8), [(0, [0]), (1, [0])], joint) < CLOSE


def test_joint_pass_of_other_state_dicts_is_refused():
    one, other = make_members(net(3))
    with pytest.raises(JointPassError):
        JointPass([one, Member(other.model, {"extra": "x", **other.names})])


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Three queries that tie their second convolution, two of them on one camera; and one that ties nothing."""
    torch.set_num_threads(1)
    models = {name: trained_looking(seed) for seed, name in enumerate(("gate", "door", "yard", "road"), 1)}
    with torch.no_grad():
        for name in ("door", "yard"):
            models[name].get_parameter("3.weight").copy_(models["gate"].get_parameter("3.weight"))
    queries = [query("gate", "left"), query("door", "left"), query("yard", "right", roi=(4, 2, 40, 30)),
               query("road", "left")]  # fmt: skip
    path = tmp_path_factory.mktemp("joint") / "joint.safetensors"
    write_bundle(path, models, queries, Made("joint", "wide", 0))
    bundle = open_bundle(path, [FACTORY])
    made = {one.id: TorchEngine(bundle, one.id) for one in bundle.queries}
    for engine in made.values():
        bind(engine, bundle)
    return bundle, made


def test_joint_queries_are_found_by_tensor_names(engines):
    bundle, made = engines
    assert joint_queries(bundle.queries, bundle.nbytes) == (("gate", "door", "yard"),)
    assert runs_jointly([made["gate"], made["yard"]])


@pytest.mark.parametrize(("camera", "found"), [("left", (("a", "b"),)), ("right", ())])
def test_joint_queries_of_one_camera_may_have_a_prefix_alone_in_common(tmp_path, camera, found):
    models = {name: trained_looking(seed) for seed, name in enumerate("ab")}
    first = models["a"].state_dict()
    prefix = {key: tensor for key, tensor in first.items() if key.startswith(("0.", "1."))}
    models["b"].load_state_dict(prefix, strict=False)
    write_bundle(tmp_path / "b.safetensors", models, [query("a", "left"), query("b", camera)], Made("p", "none", 0))
    bundle = open_bundle(tmp_path / "b.safetensors", [FACTORY])
    tied = sum(bundle.nbytes(bundle.query("a").tensors[key]) for key in prefix)
    assert tied < MIN_TIED_SHARE * sum(map(bundle.nbytes, bundle.query("a").tensors.values()))
    assert joint_queries(bundle.queries, bundle.nbytes) == found


def test_query_with_packed_weights_stays_out_of_the_pass(engines):
    bundle, _ = engines
    gate, door, yard, road = bundle.queries
    packed = replace(door, stored={"0.weight": StoredTensor("fp16")})
    assert joint_queries([gate, packed, yard, road], bundle.nbytes) == (("gate", "yard"),)


def test_joint_runner_finds_a_pass_that_mixes_common_frames(engines, monkeypatch):
    made = {name: engines[1][name] for name in ("gate", "door")}
    runner = JointRunner(made)
    assert runner.differs({name: picture(1) for name in made}) is None
    run = runner._run_joint
    monkeypatch.setattr(
        runner, "_run_joint", lambda batch, jobs: run(batch.flip(0) if len(batch) == 2 else batch, jobs)
    )
    assert runner.differs({name: picture(1) for name in made}) == "query gate gets other outputs than alone"


def test_joint_runner_answers_as_separate_runs(engines):
    made = {name: engines[1][name] for name in ("gate", "door", "yard")}
    runner = JointRunner(made)
    frames = {"gate": [picture(1), picture(2)], "door": [picture(1)], "yard": [picture(3)]}
    answers = runner.run(frames)
    for name, own in frames.items():
        given = answers[name]
        assert isinstance(given, list)
        for found, expected in zip(given, made[name].run(own), strict=True):
            assert isinstance(found, ClassPrediction) and isinstance(expected, ClassPrediction)
            assert found.label == expected.label
            assert found.score == pytest.approx(expected.score, abs=CLOSE)
    assert runner.differs({name: own[0] for name, own in frames.items()}) is None


def test_joint_runner_with_bad_frame_fails_its_query_alone(engines):
    made = {name: engines[1][name] for name in ("gate", "yard")}
    answers = JointRunner(made).run({"gate": [picture(1)], "yard": [np.zeros((1, 1, 3), np.uint8)]})
    assert isinstance(answers["yard"], Exception)
    assert isinstance(answers["gate"], list) and len(answers["gate"]) == 1


def test_joint_runner_whose_pass_fails_runs_each_query_alone(engines, monkeypatch):
    made = {name: engines[1][name] for name in ("gate", "yard")}
    runner = JointRunner(made)

    def fail(batch, jobs):
        raise JointPassError("no")

    monkeypatch.setattr(runner, "_forward", fail)
    answers = runner.run({"gate": [picture(1)], "yard": [picture(1)]})
    assert all(isinstance(found, list) and len(found) == 1 for found in answers.values())
    assert runner.differs({"gate": picture(1), "yard": picture(1)}) == "JointPassError: no"


def test_joint_pass_copies_a_tied_overflow_once_for_all_queries(engines):
    bundle, plain = engines
    tied = bundle.query("gate").tensors["3.weight"]
    made = {name: TorchEngine(bundle, name, overflow=[tied]) for name in ("gate", "door")}
    assert runs_jointly(list(made.values())) and not runs_jointly([made["gate"], plain["yard"]])
    for engine in made.values():
        bind(engine, bundle)
    frames = {"gate": [picture(1)], "door": [picture(2)]}
    answers = JointRunner(made).run(frames)
    assert sum(engine.overflow_bytes for engine in made.values()) == bundle.nbytes(tied)
    for name, own in frames.items():
        given, (expected,) = answers[name], plain[name].run(own)
        assert isinstance(given, list) and isinstance(given[0], ClassPrediction)
        assert isinstance(expected, ClassPrediction) and given[0].label == expected.label
        assert given[0].score == pytest.approx(expected.score, abs=CLOSE)
