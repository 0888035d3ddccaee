"""What malloc gives back to the kernel, and keeps if it is told to: in processes of their own, which it changes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hpctrain.system import heap
from hpctrain.system.heap import Usage, kernel_share

BLOCKS = """
import ctypes, sys
import numpy as np
from hpctrain.system import heap
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no huge pages, of which few would be needed
assert sys.argv[1] == "as it is" or heap.keep_freed()
for _ in range(2):
    before = heap.Usage.now()
    for size in (70, 64, 67) * 4:
        np.ones(size << 20, np.uint8)
print(heap.Usage.now().faults - before.faults)
"""
"""Page faults of blocks that are freed at once, the second time."""
PAGES = 12 * 64 * 256
"""What all of them have, at least."""


@pytest.mark.slow
@pytest.mark.parametrize("kept", [False, True])
def test_large_blocks_are_cleared_again_unless_they_are_kept(kept: bool) -> None:
    told = [sys.executable, "-c", BLOCKS, "kept" if kept else "as it is"]
    faults = int(subprocess.run(told, env={}, capture_output=True, check=True).stdout)
    if kept:
        assert faults < PAGES / 100
    else:
        assert faults >= PAGES


def usage(seconds: float, kernel_s: float, faults: int) -> Usage:
    return Usage(seconds, kernel_s, faults, peak_bytes=1 << 30)


@pytest.mark.parametrize(
    ("kernel_s", "faults", "share"),
    [
        (0.8, 380_000, 0.4),
        (0.8, 2_500, 0.4),  # huge pages
        (0.05, 8_000, None),  # little time
        (0.8, 500, None),  # time for something else, such as files and messages
    ],
)
def test_time_in_the_kernel_counts_if_it_hands_out_memory(kernel_s: float, faults: int, share: float | None) -> None:
    assert kernel_share(usage(10, 3, 7), usage(12, 3 + kernel_s, 7 + faults)) == pytest.approx(share)


@pytest.mark.parametrize(
    ("environment", "given"),
    [
        ({"PATH": "/bin", "OMP_NUM_THREADS": "1", "LD_PRELOAD": "libother.so"}, False),
        ({"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}, False),
        ({"GLIBC_TUNABLES": "glibc.pthread.rseq=0:glibc.malloc.perturb=0"}, True),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, True),
        ({"LD_PRELOAD": "/opt/lib/libtcmalloc.so.4"}, True),
        ({"LD_PRELOAD": "/opt/lib/libjemalloc.so"}, True),
    ],
)
def test_a_user_who_has_chosen_is_left_alone(environment: dict[str, str], given: bool) -> None:
    assert heap.is_given(environment) is given
