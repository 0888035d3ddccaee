"""Program of ``benchmarks.two_hosts`` on the ranks, for one model."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.torch_step import Plain, others, problem
from hpctrain.backends.torch.torch_bench_models import TorchBenchProblem, cross_entropy
from hpctrain.bench.ranks import Contender, take_turns
from hpctrain.bench.step import Contenders
from hpctrain.comm.world import connect

SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
"""Counter of bytes sent on this host's link."""


class Phases(Plain):
    """A loop without an exchange that records the seconds of forward, backward and update."""

    def __init__(self, problem: TorchBenchProblem, seconds: list[tuple[float, float, float]]) -> None:
        super().__init__(problem, problem.model, problem.optimizer)
        self.seconds = seconds

    def step(self) -> None:
        self.optimizer.zero_grad()
        begin = time.perf_counter()
        loss = cross_entropy(self.model(self.problem.inputs), {"target": self.problem.targets})
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        self.seconds.append((forward - begin, backward - forward, time.perf_counter() - backward))


class Counted:
    """A contender whose bytes on the link are counted.

    Args:
        contender: makes the steps.
        sent: receives the bytes of each step.
    """

    def __init__(self, contender: Contender, sent: list[int]) -> None:
        self.contender, self.sent = contender, sent
        self.weights_hash, self.close = contender.weights_hash, contender.close

    def step(self) -> None:
        before = int(SENT.read_text())
        self.contender.step()
        self.sent.append(int(SENT.read_text()) - before)


def main() -> None:
    """Measures; rank 0 writes the results."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--model", "--contenders", "--out"):
        parser.add_argument(name, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    world, names = connect(), args.contenders.split(",")
    contenders = Contenders(problem, world, "auto", others(names, world))
    seconds: list[tuple[float, float, float]] = []
    sent: dict[str, list[int]] = {name: [] for name in names}

    def make(name: str) -> Contender:
        fresh = Phases(problem(args.model, world), seconds) if name == "none" else contenders.make(name, args.model)
        return Counted(fresh, sent[name])

    times, equal = take_turns(names, make, args.rounds, args.steps, world.data)
    everywhere = world.data.allgather([statistics.median(phase) for phase in zip(*seconds, strict=True)], "collect")
    values = sum(parameter.numel() for parameter in problem(args.model, world).model.parameters())
    rows: list[dict[str, Any]] = [
        {
            "contender": name,
            "seconds": times[name],
            "sent_bytes": statistics.median(sent[name]),
            "weights_equal": equal[name],
            "choice": contenders.chosen.get(args.model) if name == "auto" else None,
        }
        for name in names
    ]
    if world.rank == 0:
        phases = [max(rank[phase] for rank in everywhere) for phase in range(3)]
        Path(args.out).write_text(json.dumps({"phases_s": phases, "values": values, "rows": rows}))


if __name__ == "__main__":
    main()
