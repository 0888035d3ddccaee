"""Samples per second of two hosts with ``sync.kind: local``, compared with an exchange in each step.

    python -m benchmarks.apart [--rate 100mbit] [--model gpt] [--json]

Two network namespaces (root, iproute2) act as hosts, with one rank each. Rows: over a slow link; and over a fast link
with a last rank that takes twice as long per update. Contenders take turns.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.support.netns import network

CONTENDERS = {"slow link": "overlap,overlap-fp16,local", "slow rank": "overlap-fp16,local"}
FAST = "10gbit"


def main() -> None:
    """Measures and prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit", help="of the slow link in each direction, as tc writes it")
    parser.add_argument("--model", default="gpt", help="of hpctrain bench step (default: gpt)")
    parser.add_argument("--turns", default="2", help="of each contender (default: 2)")
    parser.add_argument("--parts", default=",".join(CONTENDERS), help="what to measure (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    rows = []
    for part in args.parts.split(","):
        rate = args.rate if part == "slow link" else FAST
        with tempfile.TemporaryDirectory(prefix="apart-") as folder, network(2, rate, Path(folder)) as hosts:
            out = Path(folder, "rows.json")
            options = [
                "--model",
                args.model,
                "--turns",
                args.turns,
                "--contenders",
                CONTENDERS[part],
                "--out",
                str(out),
            ]
            options += ["--slow"] if part == "slow rank" else []
            hosts.mpirun(2, "benchmarks.apart_ranks", *options, env={"OMP_NUM_THREADS": "1"}, timeout=900)
            rows += [{"part": part, "rate": rate, **row} for row in json.loads(out.read_text())]
    if args.json:
        print(json.dumps({"rows": rows}))
        return
    table = Table("", "link", "contender", "samples/s", "to the first", box=None)
    for row in rows:
        numbers = f"{row['samples_per_s']:.1f}", f"{row['ratio']:.2f}"
        table.add_row(row["part"], row["rate"], row["contender"], *numbers)
    Console().print(table)


if __name__ == "__main__":
    main()
