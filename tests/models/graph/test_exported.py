"""Files of the usual exporters, as the corpus (benchmarks/models) makes them: one of each source by each exporter."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.models.corpus import Entry, check_file, export_entry

ENTRIES = [
    Entry("torchvision", "mobilenet_v3_small", "legacy", 11, 64),
    Entry("torchvision", "shufflenet_v2_x0_5", "dynamo", 23, 64),
    Entry("torchvision", "squeezenet1_0", "pt2", 18, 64),
    Entry("timm", "convnext_atto", "legacy", 14, 64, dynamic=True),
    Entry("timm", "mobilevit_xxs", "dynamo", 20, 64),
    Entry("transformers", "vit", "legacy", 16, 64),
    Entry("transformers", "yolos", "dynamo", 18, 64),
]


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_exported_file_imports_answers_and_learns(entry: Entry, tmp_path: Path):
    pytest.importorskip(entry.source)
    path = tmp_path / entry.name
    export_entry(entry, path)
    row = check_file(path)
    assert row.passed, row
