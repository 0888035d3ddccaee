"""Tests of ``hpctrain bench scaling`` on this machine's ranks, and of its model on hosts with slow links."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hpctrain.bench.scaling import allreduce_over_ring
from hpctrain.bench.scaling_model import Sample, Shape, fit_exchange
from tests.support import netns
from tests.support.command import hpctrain, write_run

RATE = "200mbit"
"""Slow enough that links, not the two cores that serve four hosts, are the bottleneck."""
RATE_BYTES_PER_S = 200e6 / 8
SIZES = (2**18, 2**20, 2**22)
WITHIN = 0.25


@pytest.fixture
def network(tmp_path: Path) -> Iterator[netns.Network]:
    """A network of four hosts."""
    try:
        with netns.network(4, RATE, tmp_path) as made:
            yield made
    except netns.NotPermitted as error:
        pytest.skip(str(error))


def measured(network: netns.Network, hosts: int, out: Path) -> list[Sample]:
    """Measure exchanges on the first hosts with the benchmark's program."""
    sizes = ",".join(map(str, SIZES))
    network.mpirun(hosts, "hpctrain.bench.scaling_exchange", "--out", out, "--bytes", sizes, "--rounds", 1)
    rows = json.loads(out.read_text())["rows"]
    assert {row["nodes"] for row in rows} == {hosts}, "MPI takes namespaces for hosts"
    return [Sample(Shape(hosts, 1), row["bytes"], row["seconds"], row["ring"]) for row in rows]


@pytest.mark.slow
@pytest.mark.world_size(4)
@pytest.mark.alone
def test_two_hosts_foretell_the_exchange_of_three_and_four(network: netns.Network, tmp_path: Path) -> None:
    samples = measured(network, 2, tmp_path / "2.json")
    model = fit_exchange([sample for sample in samples if sample.ring])
    assert model.between is not None
    assert 1 / model.between.s_per_byte == pytest.approx(RATE_BYTES_PER_S, rel=0.15), "the link is the limit"
    for hosts in (3, 4):
        samples = measured(network, hosts, tmp_path / f"{hosts}.json")
        for size in SIZES:
            median = float(np.median([each.seconds for each in samples if each.ring and each.bytes == size]))
            foretold = model.seconds(Shape(hosts, 1), size)
            print(f"{hosts} hosts, {size / 2**20:g} MiB: {1e3 * median:.1f} ms, foretold {1e3 * foretold:.1f} ms")
            assert foretold == pytest.approx(median, rel=WITHIN)
        slower = allreduce_over_ring(samples)
        print(f"{hosts} hosts: Allreduce takes {slower:.2f} times as long as the ring")
        assert slower is not None and slower > 1.1


@pytest.mark.tour
@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_run_at_two_sizes(tmp_path: Path) -> None:
    run_file = write_run(
        tmp_path,
        task="hpctrain.tasks.torch_digits:task",
        train={"epochs": 1, "global_batch": 64},
        reduce={"kind": "mpi"},
    )
    words = ["bench", "scaling", run_file, "--ranks", "1,2", "--steps", 24, "--rounds", 1, "--json"]
    result = json.loads(hpctrain(*words, cwd=tmp_path, timeout=280, warm="torch").stdout)
    folder = tmp_path / "runs" / "run-scaling"
    assert json.loads((folder / "scaling.json").read_text()) == result
    assert "Efficiency" in (folder / "scaling.svg").read_text()
    assert result["parallel"]["shard"] == "none"
    assert result["parallel"]["tensor"] == result["parallel"]["pipeline"] == 1
    assert result["reducer"] == "mpi-node" and result["gradient_bytes"] > 1000
    assert result["exchange"]["inside_node"]["bytes_per_s"] > 1e8
    weak, strong = result["modes"]["weak"], result["modes"]["strong"]
    assert [row["global_batch"] for row in weak["measured"]] == [64, 128]
    assert [row["global_batch"] for row in strong["measured"]] == [64, 64]
    assert weak["measured"][0] == strong["measured"][0]
    for row in (*weak["measured"], *strong["measured"]):
        parts = [row[f"{name}_s"] for name in ("compute", "exchange", "data", "rest")]
        assert 0 < row["step_s"] == pytest.approx(sum(parts))
    assert weak["recommendation"].startswith("weak scaling: ")
    done = {path: path.stat().st_mtime_ns for path in folder.glob("*/events.jsonl")}
    again = hpctrain(*words, cwd=tmp_path)
    assert json.loads(again.stdout) == result and again.stderr == ""
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/events.jsonl")} == done, "nothing ran twice"


@pytest.mark.world_size(2)
def test_a_run_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def task():\n    raise ValueError('no such data')\n")
    run_file = write_run(tmp_path, task="broken.py:task", train={"steps": 1, "global_batch": 64})
    ended = hpctrain("bench", "scaling", run_file, "--ranks", "1", "--rounds", 1, cwd=tmp_path, code=70, warm="torch")
    assert "ranks-1-batch-64-round-1 ended with exit code" in ended.stderr and "no such data" in ended.stderr
