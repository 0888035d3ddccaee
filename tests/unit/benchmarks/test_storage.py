"""Emulated accelerators of ``benchmarks.storage`` get every byte of their samples, and each sample once per epoch."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from benchmarks.storage.__main__ import is_decided
from benchmarks.storage.accelerators import taken, utilisation
from benchmarks.storage.readers import READERS, Feed
from benchmarks.storage.workloads import FILLING, WORKLOADS, indices, record

SMALL = replace(WORKLOADS["resnet50"], batch=4, record_bytes=64, compute_s=0.01, samples=24, file_samples=8, buffer=4)


@pytest.mark.parametrize("name", ["hpctrain-hdf5", "hpctrain-tar", "torch-hdf5"])
def test_a_reader_gives_whole_samples_of_one_epoch(name, tmp_path):
    FILLING[READERS[name].format](SMALL, tmp_path)
    seen: list[int] = []
    for rank in range(2):
        feed = Feed(SMALL, tmp_path, rank, size=2, workers=0, port=0)
        for batch in itertools.islice(READERS[name].batches(feed), 3):
            seen += indices(batch).tolist()
            assert [row.tobytes() for row in batch] == [record(i, SMALL.record_bytes) for i in indices(batch).tolist()]
    assert sorted(seen) == list(range(SMALL.samples))


def test_accelerators_end_together_and_only_waiting_lowers_their_utilisation(tmp_path):
    share = utilisation("none", SMALL, tmp_path, size=2, workers=0, seconds=0.3)
    assert 0 < share <= 1


def test_a_cold_turn_reads_no_sample_twice():
    """Else the second time would come from the page cache."""
    for workload in WORKLOADS.values():
        assert taken(workload, 3, 4.0) > 3 * workload.batch * 5.0 / workload.compute_s


def test_a_turn_that_cannot_bring_the_median_to_the_other_side_of_the_limit_is_not_taken():
    decided = [is_decided(shares, 0.9, 3) for shares in ([], [0.95], [0.95, 0.8], [0.95, 0.9], [0.8, 0.95, 0.8])]
    assert decided == [False, False, False, True, True]


def test_the_published_rates_follow():
    rates = {name: workload.bytes_per_s / 1e6 for name, workload in WORKLOADS.items()}
    assert rates == pytest.approx({"resnet50": 204.75, "cosmoflow": 808.14}, rel=1e-4)
