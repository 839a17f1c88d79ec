"""Sizes said in words, exact where a text rounds them."""

from __future__ import annotations

import pytest

from models.errors import exact_text, size_text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (432_345_088, "412.3 MiB"),
        (3 * 2**30, "3.0 GiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_sizes_are_said_in_powers_of_1024(nbytes, text):
    assert size_text(nbytes) == text


def test_an_exact_size_says_the_bytes_where_the_text_is_rounded():
    assert exact_text(432_345_088) == "412.3 MiB (432,345,088 bytes)" and exact_text(512) == "512 bytes"
