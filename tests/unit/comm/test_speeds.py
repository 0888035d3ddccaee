"""Slow links and devices, by their measurements."""

from __future__ import annotations

import dataclasses
import json
import runpy
import sys
from typing import Any

import pytest

from hpctrain.comm.speeds import Speeds, bus_gb_per_s, judge, network_of, rounds

GOOD: dict[str, Any] = {
    "device": "cuda",
    "within": {"n1": 210.0, "n2": 205.0, "n3": 212.0, "n4": 208.0},
    "between": [("n1", "n2", 22.0), ("n2", "n3", 21.0), ("n3", "n4", 22.5), ("n4", "n1", 22.0)],
    "devices": [(host, rank, 250.0 + rank) for host in ("n1", "n2", "n3", "n4") for rank in range(4)],
    "network": "IB",
    "fabrics": dict.fromkeys(("n1", "n2", "n3", "n4"), "InfiniBand"),
}


def found(**changed: Any) -> list[tuple[str | None, str]]:
    return [(one.host, one.what) for one in judge(Speeds(**GOOD | changed))]


def test_equal_parts_are_not_slow():
    assert found() == []


def test_a_slow_gpu_is_named_with_its_host():
    slow = [*GOOD["devices"][:5], ("n2", 1, 140.0), *GOOD["devices"][6:]]
    assert found(devices=slow) == [("n2", "the GPU of local rank 1 on n2 computes at 140 TFLOP/s, its peers at 252")]


def test_a_host_all_of_whose_links_are_slow_is_named_and_its_neighbours_are_not():
    links = [("n1", "n2", 22.0), ("n2", "n3", 4.0), ("n3", "n4", 4.1), ("n4", "n1", 22.0)]
    assert found(between=links) == [("n3", "n3 exchanges with other nodes at 4.1 GB/s, its peers at 22")]


def test_a_slow_link_of_two_good_hosts_is_named_with_both():
    links = [("n1", "n2", 22.0), ("n2", "n3", 4.0), ("n3", "n4", 22.0), ("n4", "n1", 22.0)]
    assert found(between=links) == [(None, "n2 and n3 exchange at 4 GB/s, its peers at 22")]


def test_a_single_link_is_judged_by_a_floor_on_gpus_only():
    few: dict[str, Any] = {"within": {"n1": 1.5}, "between": [("n1", "n2", 0.11)], "devices": [("n1", 0, 90.0)]}
    assert [what for _, what in found(**few)] == [
        "ranks on n1 exchange at 1.5 GB/s, less than 2",
        "n1 and n2 exchange at 0.11 GB/s, less than 1",
    ]
    assert found(**few, device="cpu") == []


@pytest.mark.parametrize(
    ("fabric", "missing"), [("InfiniBand", "libibverbs"), ("Slingshot", "aws-ofi-nccl"), ("EFA", "libnccl-net")]
)
def test_sockets_beside_a_fast_network_end_the_job_and_name_the_plugin(fabric, missing):
    speeds = Speeds(**GOOD | {"network": "Socket", "fabrics": {"n1": fabric, "n2": fabric}})
    first = next(judge(speeds))
    assert first.fatal and first.host is None and missing in first.fix
    assert first.what == f"NCCL uses sockets between nodes although there is {fabric} on n1, n2"


def test_sockets_are_fine_without_a_fast_network_or_on_one_node():
    assert found(network="Socket", fabrics={}) == found(network="Socket", between=[]) == []


def test_the_network_is_read_from_nccls_own_output():
    log = "n1:9:9 [0] NCCL INFO NET/IB : No device found.\nn1:9:9 [0] NCCL INFO Using network Socket\nn1:9:9 [0] more\n"
    assert (network_of(log), network_of("NCCL INFO Using network AWS Libfabric"), network_of("")) == (
        "Socket",
        "AWS Libfabric",
        "",
    )


@pytest.mark.parametrize("nodes", range(1, 10))
def test_every_node_meets_both_neighbours_and_one_at_a_time(nodes):
    pairs = [pair for each in rounds(nodes) for pair in each]
    links = {frozenset((node, (node + 1) % nodes)) for node in range(nodes)} if nodes > 1 else set()
    assert {frozenset(pair) for pair in pairs} == links
    assert len(pairs) == len(links)
    assert all(len({*sum(each, ())}) == 2 * len(each) for each in rounds(nodes))


def test_figures_survive_json_and_are_said():
    speeds = Speeds.read(json.loads(json.dumps(dataclasses.asdict(Speeds(**GOOD)))))
    assert list(judge(speeds)) == []
    assert dict(speeds.sentences()) == {
        "links": "205 to 212 GB/s within a node, 21 to 22.5 GB/s between nodes (64 MB allreduce, NCCL over IB)",
        "matrix product": "250 to 253 TFLOP/s on each cuda",
    }
    assert bus_gb_per_s(10**9, 4, 1.0) == 1.5


def test_without_pytorch_one_sentence_says_why_nothing_is_measured(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "hpctrain.backends.torch.measure", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("hpctrain.backends.torch.measure", run_name="__main__")
    assert (ended.value.code, capsys.readouterr().err) == (None, "PyTorch, which measures them, is not installed\n")
