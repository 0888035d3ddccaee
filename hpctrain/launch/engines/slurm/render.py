"""Renders job scripts: pure functions from a configuration to the text that sbatch reads."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from hpctrain.config.sections import Config, LaunchConfig
from hpctrain.errors import UserError
from hpctrain.launch.engines.slurm import FILES
from hpctrain.launch.engines.slurm.directives import Directive, build, limit_seconds, printable, shell_word, variable

EARLY_S = 60
"""Seconds by which Slurm may send the signal early (see sbatch --signal)."""


def job_script(
    config: Config,
    run_file: Path,
    logs: Path,
    bin_dir: Path | None,
    signal_s: int,
    array: str | None = None,
    in_order: bool = False,
) -> str:
    """Returns the job script of a run.

    Args:
        config: configuration with the site profile applied (``profile.resolve``).
        run_file: run file that the job supervises; for an array the folder that holds ``<index>/run.yaml``.
        logs: existing folder for the job's log.
        bin_dir: folder of ``hpctrain``, if it is not on PATH in the job.
        signal_s: seconds before the time limit at which the supervisor is asked to stop.
        array: indices of a job array.
        in_order: have ranks fill one node after the other.

    Raises:
        UserError: a value that Slurm or the shell does not accept.
    """
    if "\\" in str(logs):
        raise UserError(
            f"run_dir {logs.parent} has a backslash, and Slurm finds no log there", "choose another run_dir"
        )
    # Slurm expands patterns such as %j in the path.
    folder = printable(str(logs), "run_dir").replace("%", "%%")
    output = f"{folder}/slurm-{'%A_%a' if array else '%j'}.out"
    directives = build(config.name, config.launch, output, signal_s, array, in_order)
    return _rendered(
        config.launch,
        directives,
        origin=f"Run {config.name}, written by hpctrain: to change it, change the run file and render it again.",
        run_file=printable(str(run_file), "run file"),
        bin=None if bin_dir is None else printable(str(bin_dir), "environment"),
        signal_s=signal_s,
        elements=array is not None,
    )


def portable_script(config: Config, signal_s: int) -> str:
    """Returns a script for any run file: ``sbatch script.sbatch run.yaml``, with hpctrain on PATH."""
    directives = build(config.name, config.launch, "%x-%j.out", signal_s)
    origin = "Usage: sbatch THIS_SCRIPT run.yaml"
    return _rendered(config.launch, directives, origin=origin, run_file=None, bin=None, signal_s=signal_s)


def signal_seconds(launch: LaunchConfig, step_s: float | None = None, save_s: float | None = None) -> int:
    """Returns the seconds before the time limit at which a job is asked to stop.

    As given; else twice the longest step plus save that earlier attempts measured, plus EARLY_S; else a tenth of the
    time limit, between 30 s and 5 minutes. The last two are at most half the time limit.
    """
    if launch.slurm.signal_s:
        return launch.slurm.signal_s
    limit = limit_seconds(launch.slurm.time) if launch.slurm.time else None
    if step_s is not None and save_s is not None:
        wanted = EARLY_S + math.ceil(2 * (step_s + save_s))
        return wanted if limit is None else max(1, min(wanted, limit // 2))
    return 300 if limit is None else max(1, min(300, max(30, limit // 10), limit // 2))


def _rendered(launch: LaunchConfig, directives: Sequence[Directive], **about: Any) -> str:
    """Renders a script, which ends in a newline; ``about``: further variables of the template."""
    return (
        templates()
        .get_template("job.sh.j2")
        .render(
            directives=directives,
            modules=[printable(module, "launch.modules") for module in launch.modules],
            setup=launch.setup,
            env={variable(name): value for name, value in launch.env.items()},
            **about,
        )
    )


@functools.cache
def templates() -> jinja2.Environment:
    """Returns the environment with the templates of job scripts."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FILES / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # shell, not HTML: every value goes through `word`
    )
    environment.filters["word"] = shell_word
    return environment
