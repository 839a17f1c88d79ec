"""Runs more vision models on one edge box by sharing their weights; this is all of its public Python API.

| name | what it does |
| --- | --- |
| `open_bundle(path, factories=())` | a bundle; its `.build(query)` is a plain `torch.nn.Module` with `.preprocess` |
| `load_model(path)` | the model of an .onnx or .pt2 file, with `.preprocess`, `.decode` and `.predict` |
| `export(bundle, query, out)` | one query's model as an ONNX file |
| `export_folder(bundle, out)` | all of them, beside one file of weights that they share |
| `verify(bundle, factories=())` | every problem of a bundle, one line each |
| `load_workload(path)` | a workload file as a `Workload` of `Query` values |
| `inspect(workload)` | models, bytes, groups and the layer-sharing bound |
| `train(workload)` | trains the originals that have no weights yet |
| `merge(workload, out, method)` | writes a bundle |
| `pack(files, out, frames)` | ONNX files as they are in one bundle, measured beside plain sessions |
| `prove(bundle, workload, answers)` | what footage, answers and labels prove of a bundle, without a new merge |
| `plan(bundle, conditions)` | what fits, what swaps and what rate each query will have |
| `place(fleet, out, objective)` | which queries of a fleet go on which box |
| `simulate(bundle, conditions)` | the box's own schedule on a virtual clock |
| `evaluate(bundle, workload, out)` | offline and streaming accuracy, and a report |
| `compare_reports(reports, out)` | several evaluations of one workload beside each other, as a page |
| `run(config)` | the edge daemon |
| `check_drift(spool, workload, out)` | a box's predictions against its originals'; reverts queries below target |
| `mend_drift(spool, workload, out)` | trains norms and head of drifted queries on sampled frames |
| `Bundle`, `Workload`, `Query`, `Conditions` | what they take and give |
| `Preprocess` | how frames are prepared, where a file does not say it |
| `MergeOptions`, `Recipe`, `TrainOptions` | options of `merge` and `train` |
| `GemelError`, `InputError`, `BundleError` | what they raise: one line with the place, the problem and what to do |

A workload is given by its path or as a `Workload`. A name's imports are loaded at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemel.api import (
        check_drift,
        compare_reports,
        evaluate,
        export,
        export_folder,
        inspect,
        load_model,
        mend_drift,
        merge,
        open_bundle,
        pack,
        place,
        plan,
        prove,
        run,
        simulate,
        train,
        verify,
    )
    from gemel.conditions import Conditions
    from gemel.merger import MergeOptions, Recipe, TrainOptions
    from gemel.models.bundle import Bundle
    from gemel.models.errors import BundleError, GemelError, InputError
    from gemel.models.preprocess import Preprocess
    from gemel.models.workload import Query, Workload, load_workload

__version__: str
"""Of the package that is installed."""
__all__ = [
    "Bundle",
    "BundleError",
    "Conditions",
    "GemelError",
    "InputError",
    "MergeOptions",
    "Preprocess",
    "Query",
    "Recipe",
    "TrainOptions",
    "Workload",
    "check_drift",
    "compare_reports",
    "evaluate",
    "export",
    "export_folder",
    "inspect",
    "load_model",
    "load_workload",
    "mend_drift",
    "merge",
    "open_bundle",
    "pack",
    "place",
    "plan",
    "prove",
    "run",
    "simulate",
    "train",
    "verify",
]

_HOMES = {
    "gemel.conditions": ("Conditions",),
    "gemel.merger": ("MergeOptions", "Recipe", "TrainOptions"),
    "gemel.models.bundle": ("Bundle",),
    "gemel.models.errors": ("BundleError", "GemelError", "InputError"),
    "gemel.models.preprocess": ("Preprocess",),
    "gemel.models.workload": ("Query", "Workload", "load_workload"),
}
"""The modules of the public names that are not in `gemel.api`."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata

        return metadata.version("gemel")
    if name not in __all__:
        raise AttributeError(f"module 'gemel' has no attribute '{name}'")
    home = next((home for home, names in _HOMES.items() if name in names), "gemel.api")
    module = importlib.import_module(home)
    value = getattr(module, name)
    value = globals()[name] = module.speak_python(value) if home == "gemel.api" else value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__", *(name for name in globals() if name.startswith("__"))]
