"""Options of a merge: what the user may set, and the tunables of the default method in one frozen dataclass."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from gemel.merger.distributed import Resources
from gemel.merger.events import Change
from gemel.merger.prices import Spending
from gemel.merger.training.recipe import Recipe, check
from gemel.merger.training.step_config import AUTO, check_precision
from gemel.models.bits import AUTO_BITS, BITS_BY_OPTION, FP32, Bits, WeightBits
from gemel.models.errors import InputError
from gemel.models.measures.evaluation import EVIDENCE, EvidenceConfig


@dataclass(frozen=True)
class TopDownConfig:
    """Tunables of the method `top-down` (merger.methods.top_down)."""

    without: tuple[Change, ...] = ()
    """Steps that are left out, for an ablation."""
    network_candidates: int = 3
    """Networks compared for the next donor, and donors that may serve no query before the step ends."""
    kin_similarity: float = 0.2
    """Cosine of two weights above which models count as fine-tuned from one network. Independently trained networks
    show a few hundredths, fine-tunes of one network above 0.5."""
    kin_rate: float = 0.4
    """Factor on the learning rate where models start from the mean of their weights: near to a solution that the full
    rate would leave."""
    hard_start: float = 0.8
    """Mean of min(1, ratio / required) before the joint training below which the merge counts as hard."""
    hard_epochs: int = 3
    """Factor on the recipe's epochs for a hard merge: 4 epochs become 12. With 8 a query of `simple` missed its
    target."""
    frozen_frames: int = 2
    """Factor on the recipe's frames per epoch while shared weights are frozen: only norms, heads and private layers
    learn, and an epoch costs no gradient of the donor."""
    norm_learning_rate: float = 1e-2
    """Peak learning rate of norms and biases while shared weights are frozen (joint training: the recipe's rate)."""
    feature_weight: float = 1.0
    """Weight of the feature loss (head inputs against the original's) beside the output loss."""
    joint_budget: float = 0.8
    """Fraction of the time and FLOPs that a joint training may use; the rest is kept for what it leaves below."""
    bits_budget: float = 0.9
    """Fraction of the time and FLOPs that sharing may use where `--weights auto` tries fewer bits after it."""
    schedules: int = 3
    """Trainings of norms, head and private layers, one after the other, while a query falls short and still gains."""


@dataclass(frozen=True)
class MergeOptions:
    """Options of a merge, the same for every method.

    `margin` is how far above its target (as a fraction of the way to 1) a query must come where a search goes by it, on
    frames that nothing trains on. What changed is then proven (merger.proof), or has its original back; with
    `accept_unproven` a plain ratio on val accepts it, too, and it is not called proven.
    Groups that save less than `min_saving` of all bytes are not tried. `effort` is how many epochs of training (every
    query's frames once) one percent of all bytes is worth: a step that could cost more than it could save is left out,
    so the search ends where none is left. `max_minutes` are those of the whole merge: no step begins once what is left
    is for proofs and test (merger.budget.reserve_end), nor after `max_flops` (image passes x FLOPs, the same bound on
    any machine).
    `share_prefix` also ties the first layers, norms included, of queries of one camera (merger.methods.prefix).
    `precision` is fp32, bf16 or auto (merger.training.step_config.choose_precision). `weights` below fp32 is the
    smallest width in which weights are stored; auto: int8, then int4, as far as they hold without training.
    `documents`: the bundle holds every network as an ONNX document.
    `public_key` is the file of the Ed25519 key that must have signed the bundle that is added to, if there is one.
    `evidence` is what val and test must hold. `resources` change how long a merge takes, not its result. `spending` has
    prices, a budget and a deadline, which end a merge like `max_minutes`.
    """

    recipe: Recipe = field(default_factory=Recipe)
    margin: float = 0.5
    accept_unproven: bool = False
    min_saving: float = 0.0
    effort: float = 10.0
    max_minutes: float | None = None
    max_flops: float | None = None
    share_prefix: bool = False
    precision: str = AUTO
    weights: WeightBits = AUTO_BITS
    documents: bool = False
    public_key: str | None = None
    top_down: TopDownConfig = field(default_factory=TopDownConfig)
    evidence: EvidenceConfig = EVIDENCE
    resources: Resources = field(default_factory=Resources)
    spending: Spending | None = None

    def __post_init__(self) -> None:
        check("margin", 0 <= self.margin <= 1, self.margin, "give a number from 0 to 1")
        check_precision(self.precision)
        if self.weights not in BITS_BY_OPTION:
            remedy = f"choose one of: {', '.join(BITS_BY_OPTION)}"
            raise InputError("options", f"'{self.weights}' is unknown", remedy, "weights")
        if self.share_prefix and self.weights not in (AUTO_BITS, FP32):
            problem = f"a common prefix has weights of {FP32}: packed weights run query by query"
            raise InputError("options", problem, "leave out one of `share_prefix` and `weights`", "share_prefix")
        check("min_saving", 0 <= self.min_saving <= 1, self.min_saving, "give a number from 0 to 1")
        check("effort", self.effort > 0, self.effort, "give a number above 0")

    @property
    def bits(self) -> tuple[Bits, ...]:
        """The steps below float32 that are tried, from the least change on."""
        return () if self.share_prefix else BITS_BY_OPTION[self.weights]

    @property
    def search_share(self) -> float:
        """The part of the budget that is for sharing; the rest is for fewer bits, which save most for their cost."""
        return self.top_down.bits_budget if self.weights == AUTO_BITS and self.bits else 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain values that identify an interrupted merge; resources may differ when it resumes."""
        plain = {name: value for name, value in self.__dict__.items() if name not in ("resources", "spending")}
        parts = {name: asdict(part) for name, part in (("recipe", self.recipe), ("top_down", self.top_down))}
        return {**plain, **parts, "evidence": asdict(self.evidence)}


@dataclass(frozen=True)
class SearchConfig:
    """What a search goes by: frames of train, so that all of val proves."""

    every: int = 5
    """One of so many clips of train is for the search and does not train."""
    min_frames: int = 100
    """Frames of train below which all of them are for both."""


SEARCH = SearchConfig()


@dataclass(frozen=True)
class MeasurementConfig:
    """How much data every measurement of a merge uses, whatever the method."""

    recalibration_frames: int = 512
    """Train frames of a BatchNorm recalibration; with 256 an original's own statistics differ between two draws."""
    recalibration_batch: int = 32
    min_recalibration_batch: int = 4
    """Smallest batch when memory is full: statistics of fewer frames say little."""
    recalibration_min_ratio: float = 0.95
    """Ratio of an untouched original after recalibration below which its norms stay in eval mode."""
    matching_frames: int = 64
    """Train frames on which outputs of norms in eval mode are matched with the original's."""
    settling_frames: int = 128
    """Train frames of the recalibration after few training steps."""
    settling_steps: int = 30
    """Steps after which 4 % of a moving average (momentum 0.1) are older than the training."""
    min_val_units: int = 10
    """Clips or tracks of val below which a query's evidence is reported as weak."""


MEASUREMENT = MeasurementConfig()
