"""Tests of World, Group and sums over ranks, on real ranks."""

from pathlib import Path

import pytest

from hpctrain.comm.launched import EXPECTED_RANKS
from tests.support.mpi import mpirun

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.world_size(n)) for n in (1, 2, 3, 4, 6)])
def test_sums_and_collectives_are_right(ranks):
    result = mpirun(ranks, PROGRAMS / "comm_sums.py", warm="torch")
    said = sorted(line for line in result.stdout.splitlines() if line.endswith("right"))
    assert said == [f"rank {rank} of {ranks}: right" for rank in range(ranks)]


@pytest.mark.world_size(2)
def test_singletons_are_noticed_before_anything_is_done():
    result = mpirun(2, PROGRAMS / "comm_sums.py", env={EXPECTED_RANKS: "4"}, check=False)
    assert result.returncode != 0
    assert "the launcher started 4 ranks but MPI sees 2" in result.output


@pytest.mark.world_size(2)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.tour)])
def test_a_loop_of_ones_own_in_under_40_lines(ranks):
    program = ROOT / "examples" / "own_loop_torch.py"
    assert len([line for line in program.read_text().splitlines() if line.strip()]) < 40
    result = mpirun(ranks, program, warm="torch")
    assert result.stdout.startswith(f"{ranks} ranks, reducer ")
    assert float(result.stdout.rsplit(" ", 1)[1]) < 0.15


@pytest.mark.world_size(2)
def test_horovods_thread_gives_way_to_computing_and_no_other_does(tmp_path):
    program = tmp_path / "priorities.py"
    program.write_text(
        "import os\n"
        "from hpctrain.reduce import horovod_setup\n"
        "from hpctrain.comm.world import connect\n"
        "def priorities():\n"
        "    return {task: os.getpriority(os.PRIO_PROCESS, int(task)) for task in os.listdir('/proc/self/task')}\n"
        "group = connect().data\n"
        "before = priorities()\n"
        "horovod_setup.start(horovod_setup.load('torch'), group, on_gpu=False)\n"
        "after = priorities()\n"
        "group.barrier('look at the priorities')\n"  # a rank that leaves ends the threads of all
        "kept = all(after.get(task, own) == own for task, own in before.items())\n"
        "print('kept' if kept else 'changed', max(after.values()) > max(before.values()))\n"
    )
    assert mpirun(2, program, warm="torch").stdout.splitlines() == ["kept True"] * 2


@pytest.mark.world_size(2)
def test_reducers_of_one_program_share_horovod(tmp_path):
    program = tmp_path / "two.py"
    program.write_text(
        "import torch\n"
        "from hpctrain.comm.world import connect\n"
        "from hpctrain.reduce.flat_layout import plan\n"
        "from hpctrain.backends.torch.reduce.messages import MessageAllreduce, horovod_sender\n"
        "group = connect().data\n"
        "def opened(half=False):\n"
        "    layout, cpu = plan([8], None, 2), torch.device('cpu')\n"
        "    sender = horovod_sender(group, cpu)\n"
        "    dtype = torch.float16 if half else None\n"
        "    made = MessageAllreduce(sender, layout, torch.float32, cpu, dtype)\n"
        "    made.flat.fill_(group.rank + 1)\n"
        "    return made\n"
        "one, two, half = opened(), opened(), opened(half=True)\n"
        "for made in (one, two, half):\n"  # all under way: their tensors need names of their own
        "    made.start(0, made.flat.numel())\n"
        "for made in (one, two, half):\n"
        "    made.finish()\n"
        "one.close()\n"
        "two.send.__self__.most = lambda *_: 3\n"  # several messages
        "two.start(0, 8)\n"
        "two.finish()\n"
        "two.close()\n"
        "half.close()\n"
        "sums = [one.flat[0], two.flat[0], two.flat[7], half.flat[0], half.flat[-1]]\n"
        "print(*map(float, sums), two.send.__self__.horovod.is_initialized())\n"
    )
    assert mpirun(2, program, warm="torch").stdout.splitlines() == ["3.0 6.0 6.0 3.0 3.0 False"] * 2


@pytest.mark.world_size(2)
def test_tensors_travel_by_groups_of_torch(tmp_path):
    program = tmp_path / "group.py"
    program.write_text(
        "import torch\n"
        "from hpctrain.comm.world import connect\n"
        "from hpctrain.backends.torch.strategies.exchange import over_torch\n"
        "from hpctrain.train.clock import NO_CLOCK, Waiting\n"
        "group = connect().data\n"
        "exchange = over_torch(group, torch.device('cpu'), Waiting(NO_CLOCK), timeout_s=60.0)\n"
        "own, other = torch.arange(3.0) + group.rank, torch.zeros(3)\n"
        "total = exchange.sum(own, torch.float64, 'add up')\n"
        "both = torch.cat(exchange.gather(own, 'gather'))\n"
        "exchange.post(own, 1 - group.rank, 0)\n"
        "exchange.expect(other, 1 - group.rank, 0)('send')\n"
        "exchange.settle('take')\n"
        "print(total.tolist(), both.tolist(), (own + other).tolist())\n"
    )
    both = [0.0, 1.0, 2.0, 1.0, 2.0, 3.0]
    wanted = f"{[1.0, 3.0, 5.0]} {both} {[1.0, 3.0, 5.0]}"
    assert mpirun(2, program, warm="torch").stdout.splitlines() == [wanted] * 2


@pytest.mark.world_size(2)
def test_horovod_sums_large_gradients_where_they_are(tmp_path):
    program = tmp_path / "apart.py"
    program.write_text(
        "import torch\n"
        "from hpctrain.comm.world import connect\n"
        "from hpctrain.config.sections import ReduceConfig\n"
        "from hpctrain.backends.torch.reduce import torch_reducers\n"
        "from hpctrain.reduce.candidates import Candidate\n"
        "group = connect().data\n"
        "torch.manual_seed(1)\n"
        "wide, conv = torch.nn.Linear(513, 700), torch.nn.Conv2d(256, 128, 3)\n"
        "model = torch.nn.ModuleList([torch.nn.Linear(8, 513), wide, conv.to(memory_format=torch.channels_last)])\n"
        "def update(reducer, passes, everywhere):\n"
        "    reducer.begin()\n"
        "    for number in range(passes):\n"
        "        torch.manual_seed(10 * group.rank + number)\n"
        "        reducer.begin_pass(number == passes - 1)\n"
        "        loss = wide(model[0](torch.randn(4, 8))).square().sum()\n"
        "        if everywhere or group.rank == 0:\n"  # a rank without a gradient sends zeros from the buffer
        "            loss = loss + conv(torch.randn(2, 256, 4, 4)).square().sum()\n"
        "        loss.backward()\n"
        "    reducer.exchange(1.0)\n"
        "    return [parameter.grad.clone() for parameter in model.parameters()]\n"
        "found = {}\n"
        "for name in ('mpi-overlap', 'horovod-overlap', 'horovod-flat'):\n"
        "    reducer = torch_reducers.TorchReducerFactory(model, ReduceConfig()).open(Candidate.parse(name), group)\n"
        "    cases = [(1, True), (1, True), (1, False), (2, True)]\n"
        "    found[name] = [grad for case in cases for grad in update(reducer, *case)]\n"
        "    print(name, [part.numel() for part in reducer.flat_gradients.elsewhere.values()])\n"
        "    reducer.close()\n"
        "wanted, *others = found.values()\n"
        "print(*(all(map(torch.equal, wanted, other)) for other in others), len(wanted))\n"
    )
    both = "[294912, 359100]"
    lines = ["mpi-overlap []", f"horovod-overlap {both}", f"horovod-flat {both}", "True True 24"]
    assert sorted(mpirun(2, program, warm="torch").stdout.splitlines()) == sorted(lines * 2)
