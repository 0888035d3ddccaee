"""Runs all rows and writes the results."""

from __future__ import annotations

import fnmatch
import json
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.gpu_proof import page
from benchmarks.gpu_proof.launch import Found, run_row
from benchmarks.gpu_proof.machine import facts
from benchmarks.gpu_proof.rows import ROWS, Row
from hpctrain.system.cgroups import usable_cores

LEAST_S = 15.0
"""Rows are not started with less time left."""
CORES_OF_A_ROW = 4
"""Cores per row: rows that measure no times run in parallel, one for each of this number of cores."""


def prove(patterns: Sequence[str], output: Path, minutes: float) -> int:
    """Runs the matching rows; returns an exit code, 1 if one failed.

    Args:
        patterns: patterns of row names.
        output: folder for gpu-proof.json, gpu-proof.md and the rows' files.
        minutes: time limit, after which no row is started and running ones are ended.
    """
    chosen = [row for row in ROWS.values() if any(fnmatch.fnmatch(row.name, one) for one in patterns)]
    if not chosen:
        print(f"no row matches {' '.join(patterns)}; there are {', '.join(ROWS)}", file=sys.stderr)
        return 64
    work = output / "rows"
    shutil.rmtree(work, ignore_errors=True)
    began = time.monotonic()
    deadline = began + 60 * minutes

    too_late = f"not run within {minutes:g} minutes"
    results = {row.name: Found(row.name, row.what, "skipped", reason=too_late) for row in chosen}
    machine, writing = facts(), Lock()

    def run(row: Row) -> None:
        left = deadline - time.monotonic()
        try:
            found = run_row(row, work / row.name, min(row.timeout_s, left)) if left >= LEAST_S else results[row.name]
        except Exception as error:  # costs its own row only
            found = Found(row.name, row.what, "failed", reason=f"{type(error).__name__}: {error}")
        with writing:
            if found.status != "failed" or time.monotonic() < deadline:  # the deadline may have ended it
                results[row.name] = found
            print(page.line(results[row.name]), flush=True)
            write()

    def write() -> dict[str, Any]:
        """Writes and returns what is known: after each row, since this process may be ended, too."""
        rows = [asdict(one) for one in results.values()]
        result = {"machine": machine, "seconds": round(time.monotonic() - began, 1), "rows": rows}
        (output / "gpu-proof.json").write_text(json.dumps(result, indent=1) + "\n")
        (output / "gpu-proof.md").write_text(page.page(result))
        return result

    with ThreadPoolExecutor(max(1, usable_cores() // CORES_OF_A_ROW)) as pool:
        list(pool.map(run, [row for row in chosen if not row.alone]))
    for row in chosen:
        if row.alone:
            run(row)
    print(f"{page.summary(write())}: {output / 'gpu-proof.md'}")
    return int(any(one.status == "failed" for one in results.values()))
