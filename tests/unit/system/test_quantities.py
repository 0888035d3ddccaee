"""Bytes and seconds for people."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.system.quantities import duration, number, quantity, size

UNIT_S = {"ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86400}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (4.2e-5, "0.042 ms"),
        (0.0031, "3.1 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (4.25, "4.2 s"),
        (59.96, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.7, "1 h 00 min"),
        (3725, "1 h 02 min"),
        (50 * 3600 + 60, "2 d 02 h"),
    ],
)
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (12.34 * 2**30, "12.3 GiB"),
        (2**54, "16384.0 TiB"),
    ],
)
def test_sizes_read_well(num_bytes, text):
    assert size(num_bytes) == text


@given(st.floats(1e-3, 1e7))
def test_a_duration_says_how_long_it_was(seconds):
    parts = re.findall(r"([\d.]+) (\w+)", duration(seconds))
    assert sum(float(number) * UNIT_S[unit] for number, unit in parts) == pytest.approx(seconds, rel=0.06)


def test_the_end_of_a_name_is_its_unit():
    told = {
        "bytes": "2.0 KiB",
        "seconds": "34 min 08 s",
        "stall_s": "34 min 08 s",
        "steps": None,
        "samples_per_s": None,
    }
    assert {key: quantity(key, 2048) for key in told} == told
    assert quantity("stall_s", None) is None
    assert quantity("seconds", True) is None
    assert quantity("goodput", 0.4247) == "42.5%"


@pytest.mark.parametrize(
    ("value", "text"), [(None, "nan"), (0.123456, "0.1235"), (15727.4, "15,727"), (9999.0, "9999"), (-2e4, "-20,000")]
)
def test_numbers_have_four_digits_and_no_powers_of_ten(value, text):
    """``status`` said 1.573e+04 samples/s, where ``watch`` said 15,727."""
    assert number(value) == text
