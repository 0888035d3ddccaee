"""``python -m benchmarks.straggler``: tests the monitor on slowdowns injected into recorded healthy traces."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.program import start
from hpctrain.errors import UserError
from hpctrain.system import foreign_text

if TYPE_CHECKING:
    from benchmarks.straggler.trials import Source

RECORDED_STEPS = 1000
COMPARED_SHARES = (0.2, 0.5, 1.5)
"""Slowdowns on which other detectors are tried too; most of them detect only large ones."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--trials", type=int, default=200, help="trials of each kind of slowdown (default: 200)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="numbers of ranks (default: 2 4 8)")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.2], help="slowdowns (default: 0.1 0.2)")
    parser.add_argument("--healthy", type=int, default=100_000, help="healthy rank-windows (default: 100000)")
    parser.add_argument("--trace", type=Path, help="recorded healthy trace (.npz); by default one is recorded first")
    parser.add_argument("--simulated", action="store_true", help="simulated noise instead of a recorded trace")
    parser.add_argument("--save-trace", type=Path, help="keep the recorded trace in this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Records, replays, prints."""
    from benchmarks.straggler import trials

    source, origin = source_of(args)
    cells = [
        trials.run_cell(source, ranks, where, share, args.trials, args.seed)
        for ranks in args.ranks
        for share in args.shares
        for where in trials.WHERE
    ]
    result = {
        "origin": origin,
        "cells": trials.as_json(cells),
        "healthy": [trials.healthy(source, ranks, args.healthy // len(args.ranks), args.seed) for ranks in args.ranks],
        "detectors": [
            row
            for share in COMPARED_SHARES
            for row in trials.compare(source, max(args.ranks), share, max(args.trials // 4, 1), args.seed)
        ],
        "cost": [trials.cost(ranks) for ranks in (8, 1000, 10_000)],
    }
    foreign_text.show(json.dumps(result) if args.json else table(result))
    return 0


def source_of(args: argparse.Namespace) -> tuple[Source, dict[str, Any]]:
    """Returns a source of healthy traces, and its description for the result."""
    import numpy as np

    from benchmarks.straggler import traces, trials
    from hpctrain.train.clock import Phase

    if args.simulated:
        return trials.from_simulation, {"kind": "simulated", "noise": 0.05, "blips": 0.01}
    if args.trace:
        if not args.trace.is_file():
            raise UserError(f"there is no trace {args.trace}", "record one with --save-trace FILE, or omit --trace")
        with np.load(args.trace, allow_pickle=False) as saved:
            spent = saved["spent"]
    else:
        spent = record()
    if args.save_trace:
        np.savez_compressed(args.save_trace, spent=spent)
    waits = spent[:, :, Phase.EXCHANGE]
    trace = traces.Trace(spent, np.ones(spent.shape[:2]), float(np.median(waits.min(axis=0))))
    busy = trace.busy()
    spread = np.median(np.abs(busy / np.median(busy, axis=1, keepdims=True) - 1)) * 1.4826
    origin = {
        "kind": "recorded",
        "ranks": trace.ranks,
        "steps": trace.steps,
        "busy_ms": float(1e3 * np.median(busy)),
        "noise": float(spread),
        "steps_above_1.5_medians": float(np.mean(busy > 1.5 * np.median(busy, axis=1, keepdims=True))),
    }
    return trials.from_recorded(trace), origin


def record() -> Any:
    """Records [2, steps, phases] seconds of two computing ranks on this machine.

    Raises:
        UserError: there is no mpirun, or the run fails.
    """
    import numpy as np

    from hpctrain.launch.mpi_library import on_ranks, probe
    from hpctrain.system import python

    environment = {**python.environment(), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    foreign_text.show(f"recording {RECORDED_STEPS} steps on 2 ranks: run nothing else meanwhile", sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        program = python.module("benchmarks.straggler.record", folder, str(RECORDED_STEPS))
        done = on_ranks(program, 2, probe(), environment, timeout_s=300)
        files = sorted(Path(folder).glob("rank-*.npy"))
        if done.code or len(files) != 2:
            raise UserError(f"recording failed: {done.messages.strip()[-400:]}", "give --trace FILE, or --simulated")
        return np.array([np.load(file, allow_pickle=False) for file in files])


def table(result: dict[str, Any]) -> str:
    """Formats the result as text."""
    origin = ", ".join(
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in result["origin"].items()
    )
    lines = [f"healthy traces: {origin}", ""]
    lines.append(
        f"{'ranks':>5} {'slow in':<12} {'by':>5} {'right':>7} {'cause':>7} {'innocents':>9} {'p50':>5} {'p95 steps':>9}"
    )
    for cell in result["cells"]:
        lines.append(
            f"{cell['ranks']:>5} {cell['where']:<12} {cell['share']:>+5.0%} {cell['right_rank']:>7.1%} "
            f"{cell['right_cause']:>7.1%} {cell['innocents']:>9} "
            f"{cell['latency_p50']:>5.0f} {cell['latency_p95']:>9.0f}"
        )
    lines.append("")
    for row in result["healthy"]:
        lines.append(
            f"{row['rank_windows']} healthy windows of one of {row['ranks']} ranks: "
            f"{row['false_confirmations']} false confirmations"
        )
    lines += [
        "",
        f"{'slow by':>7} {'detector':<28} {'found':>7} {'innocents':>9} {'p95 steps':>9} {'blames if one is fast':>21}",
    ]
    for row in result["detectors"]:
        lines.append(
            f"{row['share']:>+7.0%} {row['detector']:<28} {row['found']:>7.1%} "
            f"{row['innocents_per_trial']:>9.3f} {row['latency_p95']:>9.0f} {row['blames_for_a_fast_rank']:>21.2f}"
        )
    lines.append("")
    for row in result["cost"]:
        lines.append(
            f"a window of {row['ranks']} ranks on the first node: {1e3 * row['seconds_per_window']:.1f} ms, "
            f"{row['window_bytes'] / 2**20:.2f} MiB received, {row['peak_bytes'] / 2**20:.0f} MiB of memory"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(
        start("straggler", "recall, precision and latency of the monitor on replayed slowdowns", add_arguments, run)
    )
