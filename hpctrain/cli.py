"""The command line: parse, dispatch, and turn errors into one sentence and an exit code.

Each command is a module of ``hpctrain.commands`` with ``add_arguments(parser)`` and ``run(args) -> int``. It is
imported when the command is called, so that ``hpctrain --help`` loads no framework, no MPI and no command.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import hpctrain
from hpctrain.errors import ExitCode, HpctrainError, MissingExtra, UserError

FRAMEWORKS = {"torch": "torch", "tensorflow": "tensorflow", "keras": "tensorflow", "mpi4py": "mpi"}
"""Extras that install what the core lacks."""


@dataclass(frozen=True)
class Command:
    """A command and the module behind it."""

    module: str
    help: str


COMMANDS = {
    "train": Command("hpctrain.commands.train", "train in this process: one rank, alone or under mpirun or srun"),
    "run": Command("hpctrain.commands.run", "train on N ranks of this machine, under supervision"),
    "sweep": Command("hpctrain.commands.sweep", "run each combination of values, and print one table of results"),
    "evaluate": Command("hpctrain.commands.train", "compute loss and metrics of a checkpoint over the validation data"),
    "predict": Command("hpctrain.commands.train", "write outputs of a checkpoint over a data set to HDF5"),
    "plan": Command("hpctrain.commands.plan", "estimate the memory per rank under each parallel plan"),
    "render": Command("hpctrain.commands.jobs", "print the job script of a run"),
    "submit": Command("hpctrain.commands.jobs", "submit a run to Slurm or another scheduler"),
    "status": Command("hpctrain.commands.jobs", "show the state of a run: queue, attempt, step, rate"),
    "logs": Command("hpctrain.commands.jobs", "show logs of a run's ranks and attempts"),
    "stop": Command("hpctrain.commands.jobs", "ask a run to save a checkpoint and stop"),
    "cancel": Command("hpctrain.commands.jobs", "end a run's jobs now"),
    "resume": Command("hpctrain.commands.jobs", "submit a stopped run again"),
    "supervise": Command("hpctrain.commands.run", "start and supervise the ranks inside a Slurm job"),
    "node": Command("hpctrain.commands.run", "offer this node to a run that uses launch.engine: runners"),
    "nodes": Command("hpctrain.commands.jobs", "list nodes that are excluded because they broke runs, and why"),
    "watch": Command("hpctrain.commands.report", "show a live view of a run: step, rate, curves, ranks, verdicts"),
    "report": Command("hpctrain.commands.report", "make one HTML page with plots from a run folder"),
    "explain": Command("hpctrain.commands.report", "say why a run ended or is slow, and what to do"),
    "compare": Command("hpctrain.commands.report", "compare several runs side by side"),
    "track": Command("hpctrain.commands.track", "send a run's events to trackers that missed some"),
    "ckpt": Command("hpctrain.commands.ckpt", "list, verify, inspect, compare and export checkpoints"),
    "data": Command("hpctrain.commands.data", "make and inspect HDF5 data sets"),
    "bench": Command("hpctrain.commands.bench", "measure steps, checkpoints, data and scaling on this machine"),
    "doctor": Command("hpctrain.commands.doctor", "check what is installed, what is wrong, and how to fix it"),
    "keys": Command("hpctrain.commands.keys", "list the keys of a run file, or those with a word"),
    "init": Command("hpctrain.commands.init", "write a task and a run file to start from"),
    "install-horovod": Command("hpctrain.commands.install_horovod", "build Horovod for what is installed here"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    home = os.path.expanduser("~")  # systemd and env -i leave HOME out; mpirun needs it
    os.environ.setdefault("HOME", home if home != "~" else "/")  # as containers do for a user without a name
    try:
        require_process()
        return dispatch(words)
    except HpctrainError as error:
        say(str(error))
        return error.exit_code
    except ModuleNotFoundError as error:  # raised by the first import that needs it
        if (extra := FRAMEWORKS.get(error.name or "")) is None:
            raise
        say(str(missing := MissingExtra(error.name or "", extra)))
        return missing.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        return ExitCode.DONE
    except PermissionError as error:  # mostly another user's run
        fix = "ask its owner for the permission, or name another path"
        say(f"{error.filename}: {error.strerror}\n  fix: {fix}")
        return ExitCode.USER_ERROR
    except KeyboardInterrupt:
        return 130


def say(text: str) -> None:
    """Prints a message. The import takes a tenth of ``hpctrain --help``, so it is done only here."""
    from hpctrain.system import output

    output.say(text)


def require_process() -> None:
    """Raises UserError if the process lacks what every command needs: standard output and a working folder."""
    if sys.stdout is None:  # its number would go to the next file that is opened
        raise UserError("standard output is closed", "send it to a file, or to /dev/null")
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working folder has been deleted", "change to another one with cd") from None


def dispatch(words: Sequence[str]) -> int:
    """Runs the module of the command that the words name."""
    if not words or words[0].startswith("-"):
        overview().parse_args(words)
        overview().print_help()
        return ExitCode.USER_ERROR
    name = words[0]
    if name not in COMMANDS:
        import difflib

        close = difflib.get_close_matches(name, COMMANDS, n=1)
        raise UserError(f"no command {name!r}", f"did you mean {close[0]}?" if close else "hpctrain --help lists them")
    parser = parser_of(name)
    words, program = before_program(words[1:])
    args, rest = parser.parse_known_args(words)
    if program and parser.get_default("program") is None:
        parser.error(f"unrecognized arguments: -- {' '.join(program)}")
    args.program = program
    if rest and not hasattr(args, "overrides"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.overrides = rest
    return int(importlib.import_module(COMMANDS[name].module).run(args))


def before_program(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words before ``--``, and the program and its arguments after it.

    If a program is given without a run file, an empty word takes the file's place.
    """
    place = list(words).index("--") if "--" in words else len(words)
    before, program = list(words[:place]), list(words[place + 1 :])
    has_file = before and not before[0].startswith("-")
    return before if has_file or not program else ["", *before], program


def parser_of(name: str) -> Parser:
    """Returns the parser of a command's arguments."""
    command = COMMANDS[name]
    parser = Parser(prog=f"hpctrain {name}", description=command.help, allow_abbrev=False)
    parser.set_defaults(command=name)
    importlib.import_module(command.module).add_arguments(parser)
    return parser


class Parser(argparse.ArgumentParser):
    """Raises UserError for usage errors, as for all other mistakes of users."""

    def error(self, message: str) -> NoReturn:
        """See ArgumentParser."""
        raise UserError(f"{self.prog.removeprefix('hpctrain ')}: {message}", f"{self.prog} --help shows what it takes")

    def format_help(self) -> str:
        """See ArgumentParser. Commands that take a run file also say where its keys are listed."""
        text = super().format_help()
        if self.get_default("overrides") is None:
            return text
        return (
            f"{text}\nEach key of the run file is an option that overrides it, such as --train.epochs 10;\n"
            "hpctrain keys [WORD] lists them. --accept KEY resumes a run although KEY has changed.\n"
        )


def overview() -> argparse.ArgumentParser:
    """The parser behind ``hpctrain --help``."""
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    parser = Parser(
        prog="hpctrain",
        usage="hpctrain COMMAND ...",
        description="Batch training of neural networks on HPC clusters.",
        epilog=f"commands:\n{lines}\n\nhpctrain COMMAND --help shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hpctrain {hpctrain.__version__}")
    return parser
