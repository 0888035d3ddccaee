"""``hpctrain doctor``: what is installed, what is wrong, how to fix it. Works without any framework and without MPI."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.doctor.check import Check, Status, problem
from hpctrain.errors import ExitCode, HpctrainError
from hpctrain.system import foreign_text
from hpctrain.system.quantities import positive

if TYPE_CHECKING:
    from hpctrain.config.sections import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_file", nargs="?", help="a run file: its folder, task and job script are checked too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "-n",
        "--ranks",
        type=positive,
        default=1,
        help="also start this many ranks, up to the run file's first step, and measure links and devices",
    )
    parser.set_defaults(overrides=[])


def run(args: argparse.Namespace) -> int:
    """Checks this machine; returns 64 if there is a problem."""
    from hpctrain.doctor import machine, slurm, software

    folder = Path("runs").absolute()
    config: Config | None = None
    more: list[Check] = []
    if args.run_file:
        from hpctrain.run.folder import RunDir

        config, more = software.of_run_file(args.run_file, args.overrides)
        folder = RunDir.of(config.name, config.run_dir).path if config else folder
    found = [*software.findings(), *machine.findings(folder), *slurm.findings(args.run_file), *more]
    if config and config.task and more[-1].status is not Status.PROBLEM:
        found.append(trial(config))  # last: loading a task may change what other checks see
        if args.ranks > 1 and found[-1].status is not Status.PROBLEM:
            found.append(trial_on_ranks(args.ranks, [args.run_file, *args.overrides]))
    if args.ranks > 1 and software.is_installed("torch"):
        found += speeds(args.ranks)
    return show(found, args.json)


def speeds(ranks: int) -> list[Check]:
    """Measures the links and devices of that many ranks."""
    from hpctrain.doctor.mpi_ranks import speeds as measured

    try:
        return list(measured(ranks))
    except HpctrainError as error:
        return [problem("links", error.what, error.fix)]


def trial(config: Config) -> Check:
    """Checks whether the task works on one batch."""
    from hpctrain.rank.trial import try_task

    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the task prints is not part of the report
            given = try_task(config)
    except HpctrainError as error:
        return problem("trial", error.what, error.fix)
    return Check("trial", f"model, loss and metrics work on a first batch: {given}")


def trial_on_ranks(ranks: int, words: Sequence[str]) -> Check:
    """Checks whether that many ranks of this machine come as far as their first step."""
    from hpctrain.doctor.mpi_ranks import started

    topic = f"{ranks} ranks"
    try:
        ended = started(["hpctrain", "train", *words, "--trial"], ranks)
    except HpctrainError as error:
        return problem(topic, error.what, error.fix)
    if ended.code == 0:
        return Check(topic, "they come as far as their first step")
    lines = [line.strip() for line in ended.messages.splitlines()]
    said = [line.partition("hpctrain: ")[2] for line in lines if line.startswith("hpctrain: ")]
    fixes = [line.partition("fix: ")[2] for line in lines if line.startswith("fix: ")]
    fix = fixes[0] if fixes else f"hpctrain run -n {ranks} {words[0]} shows more"
    return problem(topic, said[0] if said else "they ended early", fix)


def on_ranks(ranks: int, as_json: bool) -> int:
    """Checks MPI between ranks of this machine: ``hpctrain run -n 2 --doctor``."""
    from hpctrain.doctor import mpi_ranks, software

    try:
        found = [*mpi_ranks.findings(ranks), *(speeds(ranks) if software.is_installed("torch") else [])]
    except HpctrainError as error:
        found = [problem("ranks", error.what, error.fix)]
    return show(found, as_json)


def show(found: Sequence[Check], as_json: bool) -> int:
    """Prints findings; returns the exit code."""

    problems = sum(finding.status is Status.PROBLEM for finding in found)
    if as_json:
        findings = [dataclasses.asdict(finding) for finding in found]
        foreign_text.show(json.dumps({"ok": problems == 0, "findings": findings}, indent=1))
    else:
        width = max(len(finding.topic) for finding in found)
        for finding in found:
            foreign_text.show(f"{finding.status.value:<8}{finding.topic:<{width}}  {finding.value}")
            if finding.fix and finding.status is not Status.OK:
                foreign_text.show(f"{'':<{8 + width}}  fix: {finding.fix}")
        foreign_text.show(f"\n{problems or 'no'} problem{'s' if problems != 1 else ''}")
    return ExitCode.USER_ERROR if problems else ExitCode.DONE
