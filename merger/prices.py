"""The price file: kinds of machines and what an hour of each costs; budgets and deadlines as text.

    currency: usd
    kinds:
      c7i.2xlarge: {price: 0.357}
      c7i.2xlarge-spot: {price: 0.12, spot: true, interruptions: 0.1, speed: 1, count: 4}

`PRICES.trials.jsonl` beside it holds the throughput that merges had on each kind.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from gemel.models.errors import InputError, join_names
from gemel.models.files.io import AppendFile, Exact, Name, read_json_lines, read_yaml, validate
from gemel.models.notes import add_note

_CODES = (
    "aed afn all amd ars aud azn bam bdt bgn bhd bif bnd bob brl bwp byn bzd cad cdf chf clp cny cop crc cup cve "
    "czk djf dkk dop dzd egp ern etb eur fjd gbp gel ghs gmd gnf gtq gyd hkd hnl htg huf idr ils inr iqd irr isk "
    "jmd jod jpy kes kgs khr kmf krw kwd kyd kzt lak lbp lkr lrd lsl lyd mad mdl mga mkd mmk mnt mop mru mur mvr "
    "mwk mxn myr mzn nad ngn nio nok npr nzd omr pab pen pgk php pkr pln pyg qar ron rsd rub rwf sar sbd scr sdg "
    "sek sgd sos srd ssp stn syp szl thb tjs tmt tnd top try ttd twd tzs uah ugx usd uyu uzs ves vnd vuv wst xaf "
    "xcd xof xpf yer zar zmw"
)
CURRENCIES = frozenset(_CODES.split())
"""Codes of ISO 4217."""
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
TRIALS_SUFFIX = ".trials.jsonl"
"""Appended to the name of the price file."""


class MachineKind(BaseModel):
    """A kind of machine: the price of an hour, and the chance that it is taken back within an hour.

    `speed` is its throughput as a multiple of any one kind of the file, None where unknown; `count` is how many of them
    may run at once. `name` is its key.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    price: Annotated[float, Field(gt=0, le=1e6)]
    spot: bool = False
    interruptions: Annotated[float, Field(ge=0, lt=1)] = 0.0
    speed: Annotated[float, Field(gt=0, le=1e6)] | None = None
    count: Annotated[int, Field(ge=1, le=1000)] = 1
    name: str = ""

    @field_validator("interruptions")
    @classmethod
    def _check_spot(cls, value: float, info: ValidationInfo) -> float:
        if value and not info.data.get("spot"):
            raise ValueError("only a machine with `spot: true` is taken back")
        return value


class PriceList(BaseModel):
    """The kinds of machines of the price file at `path`, by name."""

    model_config = ConfigDict(extra="forbid")
    currency: str
    kinds: Annotated[dict[Name, MachineKind], Field(min_length=1, max_length=1000)]
    path: Path = Path()

    @field_validator("currency")
    @classmethod
    def _check_currency(cls, value: str) -> str:
        if value.lower() not in CURRENCIES:
            raise ValueError("unknown currency: give its code, as usd, eur or gbp")
        return value.lower()

    def kind(self, name: str | None) -> MachineKind:
        """The kind of this name, or the first; InputError for an unknown one."""
        if name is not None and name not in self.kinds:
            raise InputError(self.path, f"no kind '{name}'", f"use one of: {join_names(self.kinds)}", "--machine")
        return self.kinds[name] if name else next(iter(self.kinds.values()))


@dataclass(frozen=True)
class Spending:
    """What a merge may take: `machine` is the kind that merges, `budget` is in the currency of `prices`."""

    prices: PriceList | None = None
    machine: str | None = None
    budget: float | None = None
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        if self.prices is None and (self.budget is not None or self.machine is not None):
            option = "--machine" if self.budget is None else "--budget"
            raise InputError(option, "there are no prices", "give --prices FILE")
        if self.prices is not None:
            self.prices.kind(self.machine)

    @property
    def kind(self) -> MachineKind:
        """The kind that merges; one without a price where there are no prices."""
        nameless = MachineKind.model_construct(name="this machine", price=0.0)
        return self.prices.kind(self.machine) if self.prices else nameless

    @property
    def currency(self) -> str:
        """The currency of the prices; empty without any."""
        return self.prices.currency if self.prices else ""

    @classmethod
    def parse(
        cls,
        prices: str | Path | None = None,
        machine: str | None = None,
        budget: str | None = None,
        deadline: str | None = None,
    ) -> Spending | None:
        """From a price file, the kind of this machine, `5usd` and `2h`; None without any, InputError for bad ones."""
        if (prices, machine, budget, deadline) == (None,) * 4:
            return None
        known = None if prices is None else load_prices(prices)
        money = seconds = None
        if budget is not None:
            money, currency = _parse_amount("--budget", budget, CURRENCIES, "5usd")
            if known is not None and currency != known.currency:
                problem = f"is in {currency}, and the prices are in {known.currency}"
                raise InputError("--budget", problem, f"give it in {known.currency}")
        if deadline is not None:
            number, unit = _parse_amount("--deadline", deadline, SECONDS, "90min, 2h or 1d")
            seconds = number * SECONDS[unit]
        return cls(known, machine, money, seconds)


def load_prices(path: str | Path) -> PriceList:
    """Read a price file; InputError names the key that does not fit."""
    found = read_yaml(Path(path), PriceList, "price file", "`currency:` and `kinds:`")
    kinds = {name: kind.model_copy(update={"name": name}) for name, kind in found.kinds.items()}
    return found.model_copy(update={"path": Path(path), "kinds": kinds})


def _parse_amount(option: str, text: str, units: Collection[str], example: str) -> tuple[float, str]:
    """The number and the unit of `90min`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]+)", text.lower())
    if match is None or match[2] not in units or not float(match[1]):
        raise InputError(option, f"{text!r} is not an amount above 0 with a unit", f"write it as {example}")
    return float(match[1]), match[2]


class MergeTrial(Exact):
    """The FLOPs a second at which a machine of a kind trains a merge; of a whole merge also its FLOPs and seconds.

    `merge` tells apart merges (workload, weights, method and options), by content.
    """

    kind: str
    merge: str
    rate: Annotated[float, Field(gt=0)]
    flops: Annotated[float, Field(ge=0)] = 0.0
    seconds: Annotated[float, Field(ge=0)] = 0.0


def read_trials(prices: PriceList, merge: str) -> list[MergeTrial]:
    """All trials of a merge on kinds of the file, the last one last; InputError for a malformed line."""
    path = _trials_path(prices)
    rows = read_json_lines(path, "") if path.exists() else ()
    trials = [validate(f"{path}: line {line}", row, MergeTrial, hint="remove the line") for line, row in rows]
    return [trial for trial in trials if trial.merge == merge and trial.kind in prices.kinds]


def record_trial(prices: PriceList, trial: MergeTrial) -> None:
    """Add a trial; where the file cannot be written, a note says so."""
    path = _trials_path(prices)
    try:
        file = AppendFile(path)
        file.add(trial.model_dump_json())
        file.close()
    except InputError as error:
        add_note(path, f"cannot be written: {error}", "this trial is not known to later merges")


def _trials_path(prices: PriceList) -> Path:
    return prices.path.with_name(prices.path.name + TRIALS_SUFFIX)
