"""Training steps limited by the network: two hosts joined by a link of limited rate.

    python -m benchmarks.two_hosts [--rate 1gbit] [--ranks-per-host 1] [--models gpt,mlp,conv] [--json]

Two network namespaces (root, iproute2) act as hosts; all ranks compute on this machine's cores. Contenders are those of
``benchmarks.step``. The bound of a row is a limit for any exchange of its precision: forward, then backward or the time
of the gradients on the link, whichever is longer, then the update, each measured with ``none``, the loop without an
exchange, in the same run. Bytes are those that the first host's link sent in a step.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from tests.support.netns import network

CONTENDERS = "none,auto,mpi-pieces,mpi-flat-fp16,mpi-overlap,mpi-overlap-fp16,ddp,ddp-fp16"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
BYTES = {"fp16": 2, "bf16": 2}
"""Bytes of a value on the wire, by suffix of the contender's name; 4 for others."""
PEER = "ddp-fp16"


def main() -> None:
    """Measures and prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of the link in each direction, as tc writes it")
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--models", default="gpt,mlp,conv")
    parser.add_argument("--contenders", default=CONTENDERS)
    parser.add_argument("--rounds", default="3", help="turns of each contender")
    parser.add_argument("--steps", default="8", help="timed steps of a turn")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="two-hosts-") as folder, network(2, args.rate, Path(folder)) as hosts:
        for model in args.models.split(","):  # one program per model
            out = Path(folder, f"{model}.json")
            options = [
                "--model",
                model,
                "--contenders",
                args.contenders,
                "--rounds",
                args.rounds,
                "--steps",
                args.steps,
            ]
            environment = {"MASTER_ADDR": hosts.addresses[0], "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            hosts.mpirun(
                2,
                "benchmarks.two_hosts_ranks",
                *options,
                *("--out", str(out)),
                ranks_per_host=args.ranks_per_host,
                env=environment,
                timeout=900,
            )
            rows += judged(model, json.loads(out.read_text()), bits_per_s(args.rate))
    print(json.dumps({"rows": rows}) if args.json else table(rows))


def bits_per_s(rate: str) -> float:
    """Converts a rate in tc's notation to bits per second."""
    number, unit = re.sub("[a-z]", "", rate), re.sub(r"[\d.]", "", rate)
    return float(number) * UNITS[unit]


def judged(model: str, measured: dict[str, Any], rate: float) -> list[dict[str, Any]]:
    """Adds bounds in seconds to the rows.

    Args:
        model: name of the model.
        measured: the ranks' results.
        rate: rate of the link in bits per second.
    """
    forward, backward, update = measured["phases_s"]
    found = {row["contender"]: row["seconds"] for row in measured["rows"]}
    rows = []
    for row in measured["rows"]:
        way = row["choice"] or row["contender"]
        wire = 8 * measured["values"] * BYTES.get(way.rpartition("-")[2], 4) / rate
        bound = None if way == "none" else forward + max(backward, wire) + update
        more = {"to_bound": bound and row["seconds"] / bound, "to_peer": row["seconds"] / found.get(PEER, float("nan"))}
        rows.append({"model": model, **row, "bound_s": bound, **more})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Formats rows as a table."""
    lines = [f"{'model':<6}{'contender':<22}{'ms':>8}{'bound':>8}{'to it':>7}{'to ' + PEER:>13}{'MB sent':>9}  weights"]
    for row in rows:
        bound = f"{1e3 * row['bound_s']:>8.1f}{row['to_bound']:>7.2f}" if row["bound_s"] else f"{'-':>8}{'-':>7}"
        lines.append(
            f"{row['model']:<6}{row['contender']:<22}{1e3 * row['seconds']:>8.1f}{bound}{row['to_peer']:>13.2f}"
            f"{row['sent_bytes'] / 1e6:>9.2f}  {'equal' if row['weights_equal'] else 'differ'}"
            + (f"  chose {row['choice']}" if row["choice"] else "")
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
