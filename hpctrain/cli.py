"""The command line: parse, dispatch, and turn errors into one sentence and an exit code.

Each command lives in the room that does its work, in a module with ``add_arguments(parser)`` and ``run(args) -> int``;
it is imported when it is called for, so that ``hpctrain --help`` loads no framework, no MPI and no command.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import hpctrain
from hpctrain.errors import ExitCode, HpctrainError, UserError
from hpctrain.system import foreign_text


@dataclass(frozen=True)
class Command:
    """A command and the module behind it."""

    module: str
    help: str


COMMANDS = {
    "train": Command("hpctrain.rank_commands", "train; this process is one rank: alone, or under mpirun or srun"),
    "run": Command("hpctrain.launch.commands", "train on ranks of this machine, and watch over them"),
    "evaluate": Command("hpctrain.rank_commands", "loss and metrics of a checkpoint over the validation data"),
    "predict": Command("hpctrain.rank_commands", "outputs of a checkpoint over a data set, to HDF5"),
    "render": Command("hpctrain.launch.slurm.commands", "print the sbatch script of a run"),
    "submit": Command("hpctrain.launch.slurm.commands", "submit a run to Slurm"),
    "status": Command("hpctrain.launch.slurm.commands", "where a run stands: queue, attempt, step, rate"),
    "logs": Command("hpctrain.launch.slurm.commands", "logs of a run's ranks and attempts"),
    "stop": Command("hpctrain.launch.slurm.commands", "ask a run to save a checkpoint and stop"),
    "cancel": Command("hpctrain.launch.slurm.commands", "end a run's jobs now"),
    "resume": Command("hpctrain.launch.slurm.commands", "submit a stopped run again"),
    "supervise": Command("hpctrain.launch.commands", "inside a Slurm job: start the ranks and watch over them"),
    "watch": Command("hpctrain.watch.commands", "live view of a run: step, rate, curves, ranks, verdicts"),
    "report": Command("hpctrain.report.commands", "run folder to one HTML page with plots"),
    "explain": Command("hpctrain.report.commands", "what ended or slows a run, and what to do"),
    "compare": Command("hpctrain.report.commands", "several runs beside each other"),
    "track": Command("hpctrain.track.commands", "hand a run's model over to MLflow"),
    "ckpt": Command("hpctrain.checkpoint.commands", "list, verify, inspect, compare and export checkpoints"),
    "data": Command("hpctrain.data.commands", "make and inspect HDF5 data sets"),
    "bench": Command("hpctrain.bench.commands", "measure steps, checkpoints, data and scaling on this machine"),
    "doctor": Command("hpctrain.doctor", "what is installed, what is wrong, how to fix it"),
    "install-horovod": Command("hpctrain.install_horovod", "build Horovod against the installed frameworks and MPI"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return dispatch(words)
    except HpctrainError as error:
        foreign_text.show(f"hpctrain: {error}", sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        return ExitCode.DONE
    except PermissionError as error:  # somebody else's run, most often
        fix = "ask its owner for the permission, or name another path"
        foreign_text.show(f"hpctrain: {error.filename}: {error.strerror}\n  fix: {fix}", sys.stderr)
        return ExitCode.USER_ERROR
    except KeyboardInterrupt:
        return 130


def dispatch(words: Sequence[str]) -> int:
    """Finds the command's module and hands over to it."""
    if not words or words[0].startswith("-"):
        overview().parse_args(words)
        overview().print_help()
        return ExitCode.USER_ERROR
    name = words[0]
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        raise UserError(f"no command {name!r}", f"did you mean {close[0]}?" if close else "hpctrain --help lists them")
    command = COMMANDS[name]
    module = importlib.import_module(command.module)
    parser = Parser(prog=f"hpctrain {name}", description=command.help, allow_abbrev=False)
    parser.set_defaults(command=name)
    module.add_arguments(parser)
    args, rest = parser.parse_known_args(words[1:])
    if rest and not hasattr(args, "overrides"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.overrides = rest
    return int(module.run(args))


class Parser(argparse.ArgumentParser):
    """Usage errors end like all other mistakes of the user's."""

    def error(self, message: str) -> NoReturn:
        """See ArgumentParser."""
        raise UserError(f"{self.prog}: {message}", f"{self.prog} --help shows what it takes")

    def format_help(self) -> str:
        """See ArgumentParser. Commands that take a run file list its keys, too."""
        text = super().format_help()
        if self.get_default("overrides") is None:
            return text
        from hpctrain.config_reference import help_text

        return f"{text}\n{help_text()}"


def overview() -> argparse.ArgumentParser:
    """The parser behind ``hpctrain --help``."""
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    parser = Parser(
        prog="hpctrain",
        usage="hpctrain COMMAND ...",
        description="Batch training of neural networks on HPC clusters.",
        epilog=f"commands:\n{lines}\n\nhpctrain COMMAND --help tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hpctrain {hpctrain.__version__}")
    return parser
