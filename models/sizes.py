"""Sizes in bytes as people read them."""

from __future__ import annotations

_UNITS = ("KiB", "MiB", "GiB", "TiB")


def size_text(nbytes: float) -> str:
    """Bytes in powers of 1024: 412.3 MiB; below 1 KiB as bytes."""
    if abs(nbytes) < 1024:
        return f"{nbytes:.0f} bytes"
    value = float(nbytes)
    for unit in _UNITS:
        value /= 1024
        if abs(value) < 1024 or unit == _UNITS[-1]:
            break
    return f"{value:.1f} {unit}"


def exact_text(nbytes: int) -> str:
    """The size and, where that is rounded, the exact number: 412.3 MiB (432,345,088 bytes)."""
    return size_text(nbytes) if abs(nbytes) < 1024 else f"{size_text(nbytes)} ({nbytes:,} bytes)"
