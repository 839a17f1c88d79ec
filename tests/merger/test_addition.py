"""A bundle that grows: what stays keeps every bit, what is new takes from it, what leaves is gone."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from gemel.inspection import inspect_workload
from gemel.merger import MergeReport, TopDownConfig, merge
from gemel.merger.addition import recommend_whole_merge
from gemel.models.bundle import open_bundle, verify_bundle, write_bundle
from gemel.models.bundle.delta import write_update
from gemel.models.bundle.format import encode_header
from gemel.models.bundle.manifest import MANIFEST_KEY
from gemel.models.bundle.signing import sign_bundle
from gemel.models.bundle.writer import Made
from gemel.models.errors import InputError
from gemel.models.files.io import hold_locks
from gemel.models.workload import Workload, load_workload
from tests.merger.options import ANY_EVIDENCE, QUICK
from tests.merger.tiny import weights_of
from tests.models.bundle.test_signing import keys

FACTORIES = ["tests.merger.tiny:tiny_net"]
Q2 = {"classes": ["high", "low"], "data": "data/q2"}
OLD, NEW = "old.safetensors", "new.safetensors"


@pytest.fixture(scope="module")
def old_box(trained_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the trained workload of three queries, and a bundle of the first two."""
    folder = tmp_path_factory.mktemp("box") / "tiny"
    shutil.copytree(trained_folder, folder)
    _merge(first_two(load_workload(folder / "workload.yaml")))
    return folder


@pytest.fixture
def whole(old_box: Path, tmp_path: Path) -> Workload:
    """A copy of that folder's workload, which a test may damage, with the bundle beside it."""
    shutil.copytree(old_box, tmp_path / "tiny")
    return load_workload(tmp_path / "tiny" / "workload.yaml")


def first_two(workload: Workload) -> Workload:
    return replace(workload, queries=workload.queries[:2])


def _merge(workload: Workload, name: str = OLD, onto: str | None = None, **more: Any) -> MergeReport:
    folder, given = workload.path.parent, {"options": QUICK, **more}
    return merge(workload, folder / name, onto=None if onto is None else folder / onto, **given)


def _edit(workload: Workload, query: str | None = None, **keys: Any) -> Workload:
    document = yaml.safe_load(workload.path.read_text())
    part = document if query is None else next(one for one in document["queries"] if one["id"] == query)
    part.update(keys)
    workload.path.write_text(yaml.safe_dump(document))
    return load_workload(workload.path)


def test_new_query_takes_layers_of_the_bundle_and_the_others_keep_every_bit(whole: Workload) -> None:
    report = _merge(whole, NEW, OLD)
    before, after = (open_bundle(whole.path.parent / name, FACTORIES) for name in (OLD, NEW))
    assert verify_bundle(after.path, FACTORIES) == []
    assert [query.id for query in after.queries] == ["q0", "q1", "q2"]
    for query in before.queries:
        assert after.query(query.id) == query
        assert after.query(query.id).evidence == query.evidence
        for name in query.tensors.values():
            assert torch.equal(after.tensor(name), before.tensor(name))
    new = after.query("q2")
    assert new.tensors["last.0.weight"] in before.header.entries and new.origin is not None and new.origin.added
    assert [row.id for row in report.queries] == ["q2"] and report.met and report.addition is not None
    assert report.addition["kept"] == ["q0", "q1"] and report.addition["new"] == ["q2"]
    difference = write_update(before.path, after.path, None)
    lacking = after.header.entries.keys() - before.header.entries.keys()
    assert difference.tensors == sum(not name.startswith("pad.") for name in lacking)
    assert report.addition["new_bytes"] == report.bytes_after - before.manifest.bytes.after < 10_000


def test_new_query_takes_a_network_of_the_bundle_whole(whole: Workload) -> None:
    report = _merge(whole, NEW, OLD, options=replace(QUICK, top_down=TopDownConfig()))
    assert report.queries[0].network in ("q0", "q1")
    assert report.addition is not None and report.addition["new_bytes"] < 10_000
    assert verify_bundle(report.bundle, FACTORIES) == []


def test_new_query_uses_packed_weights_as_the_bundle_stores_them(whole: Workload) -> None:
    options = replace(QUICK, weights="int8", documents=True)
    _merge(first_two(whole), "int8.safetensors", options=options)
    report = _merge(whole, NEW, "int8.safetensors", options=options)
    assert [query.bits for query in report.queries] == ["int8"]
    before, after = (open_bundle(whole.path.parent / name, FACTORIES) for name in ("int8.safetensors", NEW))
    assert verify_bundle(after.path, FACTORIES) == [] and report.met
    assert all(after.query(query.id) == query for query in before.queries)
    new = after.query("q2")
    for key in ("body.0.weight", "last.0.weight"):
        assert new.stored[key].dtype == "int8" and new.tensors[key] in before.header.entries
        assert new.stored[key].scale in before.header.entries
    assert new.document == before.query("q0").document and new.activations


def test_query_that_leaves_takes_only_its_own_tensors(whole: Workload) -> None:
    one = replace(whole, queries=whole.queries[:1])
    report = _merge(one, NEW, OLD)
    before, after = (open_bundle(whole.path.parent / name, FACTORIES) for name in (OLD, NEW))
    assert after.queries == (before.query("q0"),) and verify_bundle(after.path, FACTORIES) == []
    assert {entry.name for entry in after.header.tensors} == set(before.query("q0").tensors.values())
    assert report.addition is not None and report.addition["removed"] == ["q1"] and report.queries == ()
    assert any("without q1" in note for note in report.notes)


def test_query_whose_original_changed_is_new_and_said(whole: Workload) -> None:
    path = weights_of(whole, "q1")
    state = load_file(path)
    save_file({**state, "head.bias": state["head.bias"] + 1e-3}, path)
    report = _merge(first_two(whole), NEW, OLD)
    assert report.addition is not None and report.addition["new"] == ["q1"] and report.addition["kept"] == ["q0"]
    assert any(note.startswith("q1: its original has changed since old.safetensors") for note in report.notes)


def test_query_id_of_another_model_is_new_and_said(whole: Workload) -> None:
    changed = _edit(whole, "q1", model_args={}, weights="weights/q2.safetensors", **Q2)
    report = _merge(first_two(changed), NEW, OLD)
    assert report.addition is not None and report.addition["new"] == ["q1"]
    assert any(note.startswith("q1: its definition has changed") for note in report.notes)


def test_rate_of_a_query_may_change_without_a_merge(whole: Workload) -> None:
    _merge(first_two(_edit(whole, "q1", fps=2, priority=3)), NEW, OLD)
    before, after = (open_bundle(whole.path.parent / name).query("q1") for name in (OLD, NEW))
    assert after == replace(before, fps=2, priority=3) and before.fps != 2


def test_bundle_without_its_originals_gives_its_layers_all_the_same(whole: Workload) -> None:
    for query in ("q0", "q1"):
        weights_of(whole, query).unlink()
    report = _merge(whole, NEW, OLD)
    before, after = (open_bundle(whole.path.parent / name) for name in (OLD, NEW))
    assert after.query("q0") == before.query("q0")
    assert after.query("q2").tensors["last.0.weight"] in before.header.entries
    assert any(note.startswith("q0: its original") and "is not at hand" in note for note in report.notes)


def test_method_none_adds_a_query_as_it_is_and_much_added_is_said(whole: Workload) -> None:
    report = _merge(whole, NEW, OLD, method="none")
    after = open_bundle(report.bundle)
    assert report.queries[0].state.value == "unchanged"
    text = recommend_whole_merge(after, whole)
    assert text.startswith("1 of 3 queries") and "could save up to 9" in text  # the layers of q2: 93,888 bytes
    assert report.addition is not None and report.addition["whole_merge"] == text
    assert recommend_whole_merge(open_bundle(whole.path.parent / OLD), first_two(whole)) == ""


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("other workload", "is of the workload 'tiny', and this one is 'yard'; give the bundle of this workload"),
        ("no query as it was", "has no query of workload.yaml as it is there; merge once without --onto"),
        ("older version", "does not say what its queries were merged from: an older version wrote it"),
        ("older format", "unknown format '2'; this version reads format 3"),
        ("damaged", "do not match its name|does not match"),
        ("another key", "its signature is not by the owner of"),
        ("no signature", "is not signed"),
        ("a key alone", "says who signed the bundle of --onto; give both, or none"),
        ("output is the bundle", "is the bundle that is added to; choose another path"),
        ("being written", "is being written by another process; wait until it is done, or choose another path"),
        ("method", "'gemel' does not go together with --onto; choose one of: top-down, none"),
        ("prefix", "does not go together with --onto: a common prefix changes queries that stay"),
    ],
)
def test_bad_addition_is_refused_in_one_line(whole: Workload, case: str, message: str) -> None:
    folder, more, name = whole.path.parent, dict[str, Any](), NEW
    content = (folder / OLD).read_bytes()
    bundle = open_bundle(folder / OLD)
    if case == "other workload":
        whole = _edit(whole, name="yard")
    elif case == "no query as it was":
        whole = _edit(whole, accuracy_target=0.9)
    elif case == "older version":
        records = [replace(record, origin=None) for record in bundle.queries]
        holders = dict.fromkeys((record.id for record in records), bundle)
        write_bundle(folder / OLD, {}, records, Made("tiny", "none", 0), overwrite=True, holders=holders)
    elif case == "older format":
        text = bundle.header.metadata[MANIFEST_KEY].replace('"format":3', '"format":2')
        head = encode_header(bundle.header.entries.values(), {MANIFEST_KEY: text})
        (folder / OLD).write_bytes(head + content[bundle.header.data_start :])
    elif case == "damaged":
        (folder / OLD).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif case in ("another key", "no signature", "a key alone"):
        if case == "another key":
            sign_bundle(folder / OLD, keys(folder, "theirs")[0])
        more = {"options": replace(QUICK, public_key=str(keys(folder, "ours")[1]))}
    elif case == "output is the bundle":
        name = OLD
    elif case in ("method", "prefix"):
        more = {"method": "gemel"} if case == "method" else {"options": replace(QUICK, share_prefix=True)}
    before = (folder / OLD).read_bytes()
    onto = None if case == "a key alone" else OLD
    if case == "being written":
        with hold_locks(folder / NEW), pytest.raises(InputError, match=message):
            _merge(whole, name, onto, **more)
    else:
        with pytest.raises(InputError, match=message) as refused:
            _merge(whole, name, onto, **more)
        assert "\n" not in str(refused.value)
    assert (folder / OLD).read_bytes() == before and not (folder / NEW).exists()


def test_overwritten_output_is_not_the_bundle_that_is_added_to(whole: Workload) -> None:
    import gemel

    path = whole.path.parent / OLD
    before = path.read_bytes()
    with pytest.raises(InputError, match="is the bundle that is added to"):
        gemel.merge(whole, path, options=QUICK, overwrite=True, onto=path, progress=None)
    assert path.read_bytes() == before


def test_signed_bundle_is_added_to_by_the_owner_of_its_key(whole: Workload) -> None:
    private, public = keys(whole.path.parent)
    sign_bundle(whole.path.parent / OLD, private)
    one = replace(whole, queries=whole.queries[:1])
    assert _merge(one, NEW, OLD, options=replace(QUICK, public_key=str(public))).notes == (
        f"{whole.path.parent / NEW}: without q1, which the workload does not name any more",
    )
    unchecked = _merge(one, "unchecked.safetensors", OLD)
    assert any("its signature is not checked; give --public-key" in note for note in unchecked.notes)


def test_addition_resumes_to_the_same_bundle_and_not_onto_another(
    whole: Workload, monkeypatch: pytest.MonkeyPatch, every_chance: None
) -> None:
    from tests.merger.kills import Killed, kill_after

    options = replace(QUICK, evidence=ANY_EVIDENCE)
    straight = _merge(whole, "straight.safetensors", OLD, options=options)
    with monkeypatch.context() as patch:
        kill_after(patch, 6)
        with pytest.raises(Killed):
            _merge(whole, NEW, OLD, options=options)
    shutil.copy(whole.path.parent / OLD, whole.path.parent / "signed.safetensors")
    sign_bundle(whole.path.parent / "signed.safetensors", keys(whole.path.parent)[0])
    with pytest.raises(InputError, match=r"belongs to another merge \(onto differ\)"):
        _merge(whole, NEW, "signed.safetensors", options=options, resume=True)
    resumed = _merge(whole, NEW, OLD, options=options, resume=True)
    assert Path(resumed.bundle).read_bytes() == Path(straight.bundle).read_bytes()


def test_inspect_says_what_a_new_query_costs_on_a_box(whole: Workload) -> None:
    inspection = inspect_workload(whole, onto=whole.path.parent / OLD)
    assert inspection.addition is not None
    (cost,) = inspection.addition["costs"]
    assert cost["id"] == "q2" and cost["bytes"] - cost["lender_bytes"] == 93_888
    assert 0 < cost["network_bytes"] < cost["lender_bytes"] and inspection.addition["freed_bytes"] == 0
    assert "2 queries stay, 1 are new, 0 leave" in inspection.to_text()
    assert inspection.to_json()["addition"]["kept"] == ["q0", "q1"]
