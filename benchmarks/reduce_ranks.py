"""Program of ``benchmarks.reduce`` on the ranks."""

from __future__ import annotations

import argparse
from functools import partial

import torch

from hpctrain.backends.torch.reduce.reducer import Reducer
from hpctrain.backends.torch.reduce.torch_reducers import TorchReducerFactory
from hpctrain.bench.ranks import take_turns, write_rows
from hpctrain.comm.world import World, connect
from hpctrain.config.sections import ReduceConfig
from hpctrain.reduce.candidates import Candidate

MIB = 2**20


class Exchange:
    """Exchanges gradients without computing any."""

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer

    def step(self) -> None:
        self.reducer.exchange()

    def weights_hash(self) -> str:
        """See Contender; there are no weights."""
        return ""

    def close(self) -> None:
        self.reducer.close()


def make(way: str, mib: float, world: World) -> Exchange:
    """Makes an exchange of ``mib`` MiB of fp32."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(max(1, int(mib * MIB) // 4)))
    return Exchange(TorchReducerFactory(model, ReduceConfig()).open(Candidate.parse(way), world.data))


def main() -> None:
    """Measures; rank 0 writes the rows."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--sizes", "--ways", "--out"):
        parser.add_argument(name, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    world = connect()
    found = []
    for mib in map(float, args.sizes.split(",")):
        makes = partial(make, mib=mib, world=world)
        times, _ = take_turns(args.ways.split(","), makes, args.rounds, args.steps, world.data)
        for way, seconds in times.items():
            rate = mib * MIB / seconds / 1e9
            found.append({"way": way, "mib": mib, "median_ms": round(seconds * 1e3, 4), "gb_per_s": round(rate, 3)})
    if world.rank == 0:
        write_rows(args.out, found)


if __name__ == "__main__":
    main()
