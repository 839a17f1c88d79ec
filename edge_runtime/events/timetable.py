"""The hours of a query: days and times of the week in a time zone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from zoneinfo import ZoneInfo

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MINUTES = 24 * 60
_SPAN = re.compile(r"(?:(?P<days>[a-z,\- ]+?) +)?(?P<h0>\d\d?):(?P<m0>\d\d) *- *(?P<h1>\d\d?):(?P<m1>\d\d)")


@dataclass(frozen=True, slots=True)
class WeekSpan:
    """From `start` to before `end`, minutes of the day, on each of these `days` (0 = Monday).

    A span whose end is not after its start goes on into the next day.
    """

    days: frozenset[int]
    start: int
    end: int

    def covers(self, day: int, minute: int) -> bool:
        """Whether a minute of a day of the week is in it."""
        if self.start < self.end:
            return day in self.days and self.start <= minute < self.end
        return (day in self.days and minute >= self.start) or ((day - 1) % 7 in self.days and minute < self.end)


@dataclass(frozen=True, slots=True)
class Timetable:
    """When a query is on, in a time zone of the IANA database."""

    zone: str
    spans: tuple[WeekSpan, ...]

    def is_on(self, unix: float) -> bool:
        """Whether the query is on at this moment, in Unix seconds."""
        local = datetime.fromtimestamp(unix, ZoneInfo(self.zone))
        return any(span.covers(local.weekday(), local.hour * 60 + local.minute) for span in self.spans)


def parse_week_span(text: str) -> WeekSpan:
    """`mon-fri 07:00-19:00`, `sat,sun 22:00-06:00`, or times alone for every day; ValueError for anything else."""
    found = _SPAN.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError(f"'{text:.60}' is no span of the week: write it like mon-fri 07:00-19:00")
    start = _parse_minute(found["h0"], found["m0"])
    end = _parse_minute(found["h1"], found["m1"])
    if start in (end, DAY_MINUTES):
        raise ValueError(f"'{text:.60}' has no time in it: for a whole day write 00:00-24:00")
    return WeekSpan(_parse_days(found["days"]), start, end)


def check_time_zone(zone: str) -> str:
    """The zone; ValueError where the IANA database has none of this name."""
    try:
        ZoneInfo(zone)
    except (ValueError, OSError, LookupError):
        raise ValueError(f"no time zone '{zone:.60}': write one like Europe/London or UTC") from None
    return zone


def _parse_minute(hour: str, minute: str) -> int:
    total = int(hour) * 60 + int(minute)
    if int(minute) > 59 or total > DAY_MINUTES:
        raise ValueError(f"{hour}:{minute} is no time of a day: write 00:00 to 24:00")
    return total


def _parse_days(text: str | None) -> frozenset[int]:
    if text is None:
        return frozenset(range(7))
    days = set[int]()
    for part in text.split(","):
        first, _, last = (end.strip() for end in part.partition("-"))
        if first not in DAYS or (last and last not in DAYS):
            raise ValueError(f"'{part.strip():.60}' is no day of the week: write {', '.join(DAYS)}, or a range of them")
        begin, end = DAYS.index(first), DAYS.index(last or first)
        days.update((begin + step) % 7 for step in range((end - begin) % 7 + 1))
    return frozenset(days)
