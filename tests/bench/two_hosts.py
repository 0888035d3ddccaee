"""A training step where the network is the limit: two hosts, one rank each, joined by a shaped link.

    python -m tests.bench.two_hosts [--rate 1gbit] [--models gpt,mlp,conv] [--json]

Two network namespaces stand for the hosts (root, iproute2); both compute on this machine's cores. Contenders as of
``hpctrain bench step``, which this calls: ``auto`` may choose fp16, beside every single way that it can choose from.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from hpctrain.bench.step import Row, table
from tests.support.netns import network

CONTENDERS = "none,auto,mpi-ring,mpi-flat,mpi-flat-fp16,horovod-overlap,horovod-overlap-fp16,ddp"


def main() -> None:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of the link in each direction, as tc writes it")
    parser.add_argument("--models", default="gpt,mlp,conv")
    parser.add_argument("--contenders", default=CONTENDERS)
    parser.add_argument("--rounds", default="3", help="turns of each contender")
    parser.add_argument("--steps", default="8", help="timed steps of a turn")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="two-hosts-") as folder, network(2, args.rate, Path(folder)) as hosts:
        for model in args.models.split(","):  # a program each, so that one that fails costs no other's rows
            out = Path(folder, f"{model}.json")
            options = {
                "--models": model,
                "--contenders": args.contenders,
                "--rounds": args.rounds,
                "--steps": args.steps,
                "--compression": "auto",
                "--out": str(out),
            }
            words = [word for pair in options.items() for word in pair]
            environment = {"MASTER_ADDR": hosts.addresses[0], "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            hosts.mpirun(2, "hpctrain.bench.torch_step", *words, env=environment, timeout=900)
            rows += [Row(**row) for row in json.loads(out.read_text())["rows"]]
    print(json.dumps({"rows": [vars(row) for row in rows]}) if args.json else table(rows))


if __name__ == "__main__":
    main()
