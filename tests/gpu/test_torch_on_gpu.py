"""PyTorch trains on a GPU as on the CPU, with one rank and with several that share the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.command import endings, hpctrain, misbehaving_run, refused
from tests.support.mpi import printed

pytestmark = pytest.mark.gpu


def run(program: str, ranks: int, *arguments: str, **environment: str) -> Any:
    """Run a program; return the JSON it prints."""
    return printed(ranks, program, *arguments, env=environment)


def test_a_gpu_trains_as_the_cpu_does():
    scenarios = ("auto", "clip", "weighted", "accumulate", "interrupted")
    on_gpu = run("torch_training.py", 1, *scenarios)
    on_cpu = run("torch_training.py", 1, *scenarios, CUDA_VISIBLE_DEVICES="")
    for name in scenarios[:-1]:
        np.testing.assert_allclose(on_gpu[name]["losses"], on_cpu[name]["losses"], rtol=1e-3)
    assert on_gpu["interrupted"]["same"] == [True]


@pytest.mark.world_size(2)
def test_auto_leaves_horovod_out_where_ranks_share_a_gpu():
    found = run("torch_training.py", 2, "auto", CUDA_VISIBLE_DEVICES="0")["auto"]
    assert found["reducer"].startswith("mpi-"), "NCCL refuses them, and a Horovod built for CPUs must not see the GPU"
    assert len(set(found["hashes"])) == 1
    np.testing.assert_allclose(found["losses"], run("torch_plain_loop.py", 1, "mean"), rtol=1e-3)


@pytest.mark.world_size(2)
def test_ranks_that_share_a_gpu_reduce_over_mpi():
    ways = ("mpi-node", "mpi-flat", "mpi-overlap", "fp16-wire", "overflowing")
    found = run("torch_training.py", 2, *ways, CUDA_VISIBLE_DEVICES="0")
    wanted = run("torch_plain_loop.py", 1, "mean")
    for way in ways[:3]:
        np.testing.assert_allclose(found[way]["losses"], wanted, rtol=1e-3)
    for way in ways[:4]:
        assert len(set(found[way]["hashes"])) == 1
    assert found["overflowing"]["after"] == [[True, 0.5], [True, 0.5]]


@pytest.mark.world_size(2)
def test_ranks_that_share_a_gpu_shard_their_optimizers(tmp_path):
    arguments = (str(tmp_path), "optimizer", "overflow", "own_steps")
    found = run("torch_sharded.py", 2, *arguments, CUDA_VISIBLE_DEVICES="0")
    wanted = run("torch_sharded.py", 2, *arguments, CUDA_VISIBLE_DEVICES="")
    np.testing.assert_allclose(found["own_steps"]["weights"], wanted["own_steps"]["weights"], rtol=1e-6, atol=1e-9)
    assert len(set(found["own_steps"]["hashes"])) == 1
    for before, spoiled, after in found["overflow"]["hashes"]:
        assert before == spoiled != after


@pytest.mark.world_size(2)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes one rank on each GPU")
def test_parameters_are_sharded_over_two_gpus(tmp_path):
    found = run("torch_fully_sharded.py", 2, str(tmp_path), "uneven", "layers")
    for case in (*found["uneven"].values(), found["layers"]):
        assert case["difference"] <= 1e-9, "in float64, whose sums a GPU may form in another order"


@pytest.mark.world_size(4)
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="NCCL takes one rank on each GPU")
def test_layers_and_stages_are_shared_out_over_four_gpus(tmp_path):
    found = run("torch_fully_sharded.py", 4, str(tmp_path), "exchanges")["exchanges"]
    for plan in found.values():
        assert plan["opened"]
        assert plan["difference"] <= 1e-9, "in float64, whose sums a GPU may form in another order"


OTHER_HOSTS = """
import os

from tests.dist.programs.launch_task import task as misbehaving

def task(world, **options):
    os.environ.update(NCCL_HOSTID=str(world.rank), NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo")
    return misbehaving(world, **options)
"""
"""A task whose ranks NCCL takes for those of several hosts, so that they may share a GPU."""


@pytest.mark.world_size(2)
def test_a_rank_that_fails_ends_the_run_though_the_other_waits_in_nccl(tmp_path):
    run_file = misbehaving_run(tmp_path, "raise", reduce={"kind": "nccl"})
    (tmp_path / "other_hosts.py").write_text(OTHER_HOSTS)
    said = hpctrain("run", "-n", 2, run_file, "--task", f"{tmp_path}/other_hosts.py:task", code=None)
    refused(said, 70, "rank 1", "ValueError: bad sample")
    assert endings(tmp_path / "run") == ["taken_down", "failed"]
