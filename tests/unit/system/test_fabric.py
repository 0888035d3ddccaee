"""The fast network and the cores next to a GPU, from a made file system of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.system.fabric import cores_near, fabric, own_cores
from hpctrain.system.quantities import numbers_in


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def adapter(root: Path, name: str, layer: str, state: str = "4: ACTIVE", driver: str = "mlx5_core") -> None:
    port = f"sys/class/infiniband/{name}/ports/1"
    write(root, **{f"{port}/link_layer": f"{layer}\n", f"{port}/state": f"{state}\n"})
    (root / "drivers" / driver).mkdir(parents=True, exist_ok=True)
    device = root / "sys/class/infiniband" / name / "device"
    device.mkdir()
    (device / "driver").symlink_to(root / "drivers" / driver)


@pytest.mark.parametrize(
    ("layer", "state", "driver", "name"),
    [
        ("InfiniBand", "4: ACTIVE", "mlx5_core", "InfiniBand"),
        ("InfiniBand", "1: DOWN", "mlx5_core", ""),
        ("Ethernet", "4: ACTIVE", "mlx5_core", ""),
        ("InfiniBand", "4: ACTIVE", "hfi1", "Omni-Path"),
        ("Unspecified", "4: ACTIVE", "efa", "EFA"),
    ],
)
def test_fast_networks_are_known_by_active_adapters(tmp_path, layer, state, driver, name):
    assert fabric(tmp_path) == ""
    adapter(tmp_path, "mlx5_0", layer, state, driver)
    assert fabric(tmp_path) == name


def test_slingshot_is_known_by_its_devices(tmp_path):
    (tmp_path / "sys/class/cxi/cxi0").mkdir(parents=True)
    assert fabric(tmp_path) == "Slingshot"


def test_cores_near_a_device_are_those_of_its_node(tmp_path):
    write(
        tmp_path,
        **{
            "sys/bus/pci/devices/0000:3b:00.0/numa_node": "1\n",
            "sys/bus/pci/devices/0000:af:00.0/numa_node": "-1\n",
            "sys/devices/system/node/node1/cpulist": "4-6,12\n",
        },
    )
    assert cores_near("0000:3B:00.0", tmp_path) == {4, 5, 6, 12}
    assert cores_near("0000:af:00.0", tmp_path) == cores_near("0000:01:00.0", tmp_path) == set()
    assert numbers_in("\n") == []


EVERY = range(8)
FIRST, SECOND = range(4), range(4, 8)


def test_ranks_keep_to_the_cores_next_to_their_gpus():
    ranks = [(EVERY, FIRST), (EVERY, FIRST), (EVERY, SECOND), (EVERY, SECOND)]
    assert [own_cores(rank, ranks) for rank in range(4)] == [{*FIRST}, {*FIRST}, {*SECOND}, {*SECOND}]


@pytest.mark.parametrize(
    "ranks",
    [
        [(FIRST, SECOND), (SECOND, FIRST)],  # the launcher has bound them, if badly
        [(EVERY, FIRST)],  # one rank and its loaders need all cores
        [(EVERY, FIRST), (EVERY, FIRST)],  # both GPUs are on one socket: half of the cores would stay idle
        [(EVERY, ()), (EVERY, ())],  # unknown
        [(FIRST, SECOND), (FIRST, SECOND)],  # the job has no cores there
        [(FIRST, FIRST), (FIRST, FIRST)],
    ],
)
def test_affinity_stays_as_it_is(ranks):
    assert [own_cores(rank, ranks) for rank in range(len(ranks))] == [set()] * len(ranks)
