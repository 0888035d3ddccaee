"""A job's ``#SBATCH`` directives as ordered data: built from the configuration, changed by the user's lines, checked.

Text that a script cannot hold is refused; all other text reaches its command unchanged.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from hpctrain.config.sections import Config, LaunchConfig, SlurmConfig
from hpctrain.errors import UserError

EXCLUSIVE = (
    {"--mem", "--mem-per-cpu", "--mem-per-gpu"},
    {"--gpus-per-node", "--gpus-per-task", "--gres=gpu"},
    {"--requeue", "--no-requeue"},
    {"--exclusive", "--oversubscribe"},
    {"--cpus-per-task", "--cpus-per-gpu"},
    {"--hint", "--threads-per-core"},
    {"--ntasks-per-node", "--ntasks-per-gpu"},
)
"""Sets of directives of which Slurm accepts at most one."""

OURS = {
    "--array",
    "--chdir",
    "--dependency",
    "--export",
    "--export-file",
    "--open-mode",
    "--signal",
    "--wrap",
    "--test-only",
}
"""Directives that are reserved for hpctrain's command line and supervisor."""

SHORT = {
    "-A": "--account", "-C": "--constraint", "-G": "--gpus", "-J": "--job-name", "-L": "--licenses", "-M": "--clusters",
    "-N": "--nodes", "-a": "--array", "-c": "--cpus-per-task", "-d": "--dependency", "-e": "--error", "-n": "--ntasks",
    "-o": "--output", "-p": "--partition", "-q": "--qos", "-s": "--oversubscribe", "-t": "--time", "-w": "--nodelist",
    "-x": "--exclude", "-b": "--begin", "-H": "--hold", "-k": "--no-kill", "-D": "--chdir", "-S": "--core-spec",
}  # fmt: skip

TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.ASCII)


@dataclass(frozen=True)
class Directive:
    """One ``#SBATCH`` line: a long option, and its value if it has one."""

    name: str
    value: str | None = None

    def __str__(self) -> str:
        return self.name if self.value is None else f"{self.name}={directive_value(self.value)}"

    @property
    def kind(self) -> str:
        """The name used to detect conflicts: ``--gres=gpu`` if it requests GPUs by --gres."""
        return "--gres=gpu" if self.name == "--gres" and re.search("(^|,)gpu", self.value or "") else self.name


def limit_seconds(limit: str) -> int | None:
    """Converts a Slurm time limit (min, min:s, h:min:s, days-h[:min[:s]]) to seconds; None if unlimited."""
    if not TIME.fullmatch(limit):
        raise UserError(f"launch.slurm.time is {limit!r}", "write 30 (minutes), 01:30:00 or 2-12:00:00")
    if not limit[0].isdigit():
        return None
    days, _, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not days and len(parts) < 3:  # min, or min:s
        parts.insert(0, 0)
    hours, minutes, secs = (*parts, 0, 0)[:3]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + secs


def ranks_per_node(launch: LaunchConfig) -> int:
    """Returns the number of ranks per node: as given, else one per GPU, else one."""
    return launch.ranks_per_node or launch.slurm.gpus_per_node or 1


def keeps_job(launch: LaunchConfig) -> bool:
    """Whether the job continues without a node that is lost."""
    return launch.spare_nodes > 0 or (launch.min_nodes or launch.nodes) < launch.nodes


def require_whole_groups(config: Config) -> None:
    """Raises UserError if a tensor group would extend over two nodes."""
    tensor, ranks = config.parallel.tensor, ranks_per_node(config.launch)
    if ranks % tensor:
        raise UserError(
            f"parallel.tensor is {tensor}, and a node has {ranks} rank{'s' if ranks > 1 else ''}: ranks that hold "
            "parts of a layer must be on one node",
            f"set launch.ranks_per_node to a multiple of {tensor}, or choose a parallel.tensor that divides {ranks}",
        )


def build(
    name: str, launch: LaunchConfig, output: str, signal_s: int, array: str | None = None, in_order: bool = False
) -> tuple[Directive, ...]:
    """Returns the directives of a job, in the script's order.

    Args:
        name: job name.
        launch: section with the site profile applied.
        output: path of the job's log; Slurm fills in %j, %A, %a.
        signal_s: seconds before the time limit at which Slurm signals the supervisor.
        array: indices of a job array, such as 0-7%4.
        in_order: have ranks fill one node after the other, whatever the site's default is.

    Raises:
        UserError: a value that Slurm does not accept, or directives that exclude each other.
    """
    slurm = launch.slurm
    limit = limit_seconds(slurm.time) if slurm.time else None
    if limit is not None and signal_s >= limit:
        what = f"launch.slurm.time {slurm.time} leaves no time before the stop signal {signal_s} s ahead of its end"
        raise UserError(what, f"give a time of more than {signal_s} s, or a smaller launch.slurm.signal_s")
    made = [
        Directive("--job-name", printable(name, "name")),
        *_given(slurm, "account", "partition", "qos", "constraint", "reservation", "licenses"),
        Directive("--nodes", str(launch.nodes + launch.spare_nodes)),
        Directive("--ntasks-per-node", str(ranks_per_node(launch))),
        *_option("--distribution", in_order and "block"),
        *_option("--cpus-per-task", slurm.cpus_per_rank),
        *_gpus(launch),
        *_memory(slurm),
        *_given(slurm, "time", "time_min", "begin"),
        # Without --no-kill, a lost node would end the whole job.
        *_flag("--no-kill", keeps_job(launch)),
        *_flag("--exclusive", slurm.exclusive),
        *_option("--exclude", printable(",".join(slurm.exclude), "launch.slurm.exclude")),
        *_option("--array", array),
        # B: only the supervisor gets the signal, which would kill the ranks.
        Directive("--signal", f"B:USR1@{signal_s}"),
        Directive("--requeue" if slurm.requeue is not False else "--no-requeue"),
        Directive("--open-mode", "append"),
        Directive("--output", printable(output, "run_dir")),
        *_given(slurm, "mail_user", "mail_type", "comment"),
    ]
    return with_one_gres(check(change(made, slurm)))


def change(made: list[Directive], slurm: SlurmConfig) -> list[Directive]:
    """Leaves out the directives that the user skips, and adds the user's own."""
    names = {directive.name for directive in made}
    skipped = {_long(name) for name in slurm.skip}
    for name in sorted(skipped - names):
        near = difflib.get_close_matches(name, names, n=1)
        fix = f"did you mean {near[0]}?" if near else f"name one of {', '.join(sorted(names))}"
        raise UserError(f"launch.slurm.skip names {name}, which the script does not have", fix)
    return [*(each for each in made if each.name not in skipped), *map(parse, slurm.extra)]


def check(directives: Iterable[Directive]) -> tuple[Directive, ...]:
    """Raises UserError if a directive occurs twice or excludes another."""
    directives = tuple(directives)
    kinds = [directive.kind for directive in directives]
    for kind in kinds:
        if kinds.count(kind) > 1 and kind != "--gres":
            fix = f"put {kind} into launch.slurm.skip if it is ours, or give it once"
            raise UserError(f"the script would have {kind} twice", fix)
    for group in EXCLUSIVE:
        found = [kind for kind in kinds if kind in group]
        if len(found) > 1:
            fix = f"keep one, and put {found[0]} into launch.slurm.skip if it is ours"
            raise UserError(f"{' and '.join(found)} exclude each other", fix)
    return directives


def with_one_gres(directives: Iterable[Directive]) -> tuple[Directive, ...]:
    """Returns the directives with all values of --gres in one line, as Slurm takes only the last."""
    gres = Directive("--gres", ",".join(each.value or "" for each in directives if each.name == "--gres"))
    return tuple({each.name: gres if each.name == "--gres" else each for each in directives}.values())


def parse(line: str) -> Directive:
    """Parses a directive as users write it: ``--mem=4G``, ``--mem 4G``, ``-p long``, ``#SBATCH --exclusive``."""
    words = printable(line, "launch.slurm.extra").strip().removeprefix("#SBATCH").strip()
    match = re.fullmatch(r"(--[a-z][a-z-]*|-[A-Za-z])(?:(?:=|\s+|(?<=^-[A-Za-z]))(.+))?", words)
    if not match:
        raise UserError(f"launch.slurm.extra has {line!r}", "write a directive as in a script, such as --nice=100")
    name, value = _long(match.group(1)), match.group(2)
    if name in OURS:
        raise UserError(f"launch.slurm.extra has {name}, which hpctrain sets itself", _alternative(name))
    if value and len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    return Directive(name, value)


def _alternative(name: str) -> str:
    return {
        "--array": "use hpctrain submit --array",
        "--dependency": "use hpctrain submit --after",
        "--signal": "use launch.slurm.signal_s",
    }.get(name, "leave it out")


def _long(name: str) -> str:
    name = name.strip()
    return SHORT.get(name, name if name.startswith("-") else f"--{name}")


def _flag(name: str, is_set: bool | None) -> list[Directive]:
    return [Directive(name)] if is_set else []


def _option(name: str, value: object) -> list[Directive]:
    """Returns a directive, if there is a value for it."""
    return [Directive(name, str(value))] if value else []


def _given(slurm: SlurmConfig, *fields: str) -> list[Directive]:
    """Returns a directive for each field that has a value."""
    found = []
    for field in fields:
        value = getattr(slurm, field)
        if value is not None:
            found.append(Directive(f"--{field.replace('_', '-')}", printable(str(value), f"launch.slurm.{field}")))
    return found


def _gpus(launch: LaunchConfig) -> list[Directive]:
    slurm = launch.slurm
    if slurm.gpus_per_node is None:
        return []
    model = f"{printable(slurm.gpu_type, 'launch.slurm.gpu_type')}:" if slurm.gpu_type else ""
    if slurm.gpu_request == "gpus-per-task":
        each, rest = divmod(slurm.gpus_per_node, ranks_per_node(launch))
        if rest or not each:
            what = f"{slurm.gpus_per_node} GPUs of a node do not divide by {ranks_per_node(launch)} ranks"
            raise UserError(what, "change launch.ranks_per_node, or set launch.slurm.gpu_request: gpus-per-node")
        return [Directive("--gpus-per-task", f"{model}{each}")]
    if slurm.gpu_request == "gpus-per-node":
        return [Directive("--gpus-per-node", f"{model}{slurm.gpus_per_node}")]
    return [Directive("--gres", f"gpu:{model}{slurm.gpus_per_node}")]


def _memory(slurm: SlurmConfig) -> list[Directive]:
    if slurm.memory is None:
        return []
    match = re.fullmatch(r"(\d+[KMGT]?)(?:/(cpu|gpu))?", slurm.memory)
    if not match:
        fix = "write 4G (each node), 2G/cpu, 16G/gpu or 0 (all of the node)"
        raise UserError(f"launch.slurm.memory is {slurm.memory!r}", fix)
    return [Directive(f"--mem-per-{match.group(2)}" if match.group(2) else "--mem", match.group(1))]


LONGEST = 4096
"""Maximum bytes of a value: sbatch reads a directive into 8192 bytes, and the kernel limits paths to 4096."""

VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def printable(value: str, key: str) -> str:
    """Returns the value; raises UserError if it has control characters (newline, NUL, escape) or is too long."""
    bad = next((character for character in value if not character.isprintable() and character != "\u00a0"), None)
    if bad is not None:
        raise UserError(f"{key} contains {bad!r}", "remove the control character")
    if len(value.encode("utf-8", "surrogateescape")) > LONGEST:
        raise UserError(f"{key} is longer than {LONGEST} bytes", "shorten it")
    return value


def shell_word(value: str) -> str:
    """Quotes a value as one word for bash, even with newlines. Raises UserError if it contains NUL."""
    if "\0" in value:
        raise UserError(f"{value!r} contains a NUL character", "remove it")
    return shlex.quote(value)


def variable(name: str) -> str:
    """Returns the name; raises UserError if it is not valid for a shell variable."""
    if not VARIABLE.fullmatch(name):
        raise UserError(f"launch.env has the name {name!r}", "use letters, digits and '_', not beginning with a digit")
    return name


def directive_value(value: str) -> str:
    """Quotes a value for sbatch's own parser of ``#SBATCH`` lines, which differs from bash's.

    Between double quotes it takes everything literally except quotes and backslashes; a backslash makes the next
    character literal.
    """
    if re.fullmatch(r"[\w.,:;/@%+=*&|()\[\]-]+", value, re.ASCII):
        return value
    return '"' + re.sub(r"([\\\"'#])", r"\\\1", value) + '"'
