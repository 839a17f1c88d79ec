"""Stands in for torch.cuda on a machine without a card: streams do nothing, and every call is put on record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class FakeCuda:
    """Work is done at once, in the order of the calls; `record` holds (what, stream, event) in that order."""

    def __init__(self, pin_code: int = 0) -> None:
        self.record: list[tuple[str, str, int | None]] = []
        self.compute, self.events, self.pinned, self.pin_code = FakeStream(self, "compute"), 0, [], pin_code
        self.active = self.compute

    def Stream(self, _device: object) -> FakeStream:
        return FakeStream(self, "copy")

    def Event(self, enable_timing: bool = False) -> FakeEvent:
        self.events += 1
        return FakeEvent(self, self.events - 1)

    def current_stream(self, _device: object) -> FakeStream:
        return self.active

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.active = self.active, stream
        yield
        self.active = before

    def synchronize(self, _device: object) -> None:
        self.record.append(("synchronise", "all", None))

    def empty_cache(self) -> None:
        self.record.append(("empty cache", "all", None))

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, pointer: int, _nbytes: int, _flags: int) -> int:
        self.pinned.append(pointer)
        return self.pin_code

    def cudaHostUnregister(self, pointer: int) -> int:
        self.pinned.remove(pointer)
        return 0


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.record.append(("wait", self.name, event.index))

    def synchronize(self) -> None:
        self.cuda.record.append(("synchronise", self.name, None))


class FakeEvent:
    def __init__(self, cuda: FakeCuda, index: int) -> None:
        self.cuda, self.index = cuda, index

    def record(self, stream: FakeStream) -> None:
        self.cuda.record.append(("event", stream.name, self.index))

    def synchronize(self) -> None:
        self.cuda.record.append(("wait", "host", self.index))

    def elapsed_time(self, _end: FakeEvent) -> float:
        return 2000.0
