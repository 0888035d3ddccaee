"""Measures training steps with each way of exchanging gradients: ``hpctrain bench step``, and its program."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

from hpctrain.bench.ranks import Contender, on_ranks, take_turns, write_rows
from hpctrain.comm.world import World, alone, connect
from hpctrain.config.sections import Config, ParallelConfig, ReduceConfig, TrainConfig
from hpctrain.errors import ExitCode, UserError
from hpctrain.reduce.candidates import EVERY_CANDIDATE, Candidate
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.system import foreign_text
from hpctrain.system.quantities import positive
from hpctrain.train.framework import Framework, HostBatch, StepSettings, samples_of

FRAMEWORKS = ("torch", "tensorflow")
MODELS = ("gpt", "mlp", "conv")
CONTENDERS = ("none", "auto", "horovod", "mpi")


@dataclass(frozen=True)
class BenchRow:
    """One contender on one model."""

    framework: str
    model: str
    contender: str
    median_ms: float
    """Median step of the slowest rank, in ms."""
    ratio_to_none: float | None
    """Ratio to the step without any exchange in the same run."""
    weights_equal: bool
    """Whether weights were bitwise identical on all ranks after each timed run; without an exchange they are not."""
    choice: str | None = None
    """The reducer that ``auto`` chose."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, (*FRAMEWORKS, "all"), MODELS, CONTENDERS)


def add_options(
    parser: argparse.ArgumentParser, frameworks: Sequence[str], models: Sequence[str], contenders: Sequence[str]
) -> None:
    """Adds options of this benchmark and of ``benchmarks.step``, which has more models and contenders."""
    parser.add_argument("--framework", choices=frameworks, default="torch", help="whose step (default: torch)")
    parser.add_argument("--models", default=",".join(MODELS), help=f"comma-separated among {', '.join(models)}")
    parser.add_argument(
        "--contenders",
        default=",".join(CONTENDERS),
        help=f"comma-separated: {', '.join(contenders)}, or a way such as mpi-flat-fp16",
    )
    parser.add_argument("--ranks", type=positive, default=2, help="ranks on this machine, one thread each (default: 2)")
    parser.add_argument("--rounds", type=positive, default=3, help="turns of each contender (default: 3)")
    parser.add_argument("--steps", type=positive, default=12, help="timed steps of a turn (default: 12)")
    parser.add_argument(
        "--compression",
        choices=("none", "fp16", "auto"),
        default="none",
        help="what auto may choose from (default: none)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    frameworks = FRAMEWORKS if args.framework == "all" else (args.framework,)
    ways = (*CONTENDERS, *(candidate.name for candidate in EVERY_CANDIDATE))
    return measure(__name__, args, frameworks, MODELS, ways)


def measure(
    program: str, args: argparse.Namespace, frameworks: Sequence[str], models: Sequence[str], contenders: Sequence[str]
) -> int:
    """Runs contenders in turn on ranks of this machine and prints the rows; returns an exit code.

    Raises:
        UserError: a model or contender is unknown.
        RunFailed: the program failed.
    """
    for kind, given, known in (("model", args.models, models), ("contender", args.contenders, contenders)):
        if unknown := [name for name in given.split(",") if name not in known]:
            raise UserError(f"there is no {kind} {unknown[0]!r}", f"choose among {', '.join(known)}")
    options = {f"--{name}": str(getattr(args, name)) for name in OPTIONS}
    found = [
        BenchRow(**row)
        for framework in frameworks
        for row in on_ranks(program, {"--framework": framework, **options}, args.ranks)
    ]
    foreign_text.show(json.dumps({"rows": [asdict(row) for row in found]}) if args.json else table(found))
    return ExitCode.DONE


OPTIONS = ("models", "contenders", "rounds", "steps", "compression")
"""Options passed to the program."""


def table(found: Sequence[BenchRow]) -> str:
    """Formats rows as a table."""
    head = f"{'framework':<11}{'model':<15}{'contender':<16}{'median ms':>10}{'to none':>9}  weights"
    lines = [
        f"{row.framework:<11}{row.model:<15}{row.contender:<16}{row.median_ms:>10.2f}"
        + (f"{row.ratio_to_none:>9.2f}" if row.ratio_to_none else f"{'-':>9}")
        + ("  equal" if row.weights_equal else "  differ")
        + (f"  chose {row.choice}" if row.choice else "")
        for row in found
    ]
    return "\n".join([head, *lines])


class BenchProblem(Protocol):
    """A model and this rank's samples; all ranks have the same weights."""

    @property
    def batch(self) -> HostBatch:
        """This rank's samples."""

    def open(self, world: World, config: StepSettings, choice: ReducerChoice) -> Framework:
        """Opens hpctrain's framework for the model. Collective."""


class Ours:
    """hpctrain's own step, as the training loop calls it."""

    def __init__(
        self, problem: BenchProblem, world: World, reduce: ReduceConfig, parallel: ParallelConfig, chosen: str | None
    ) -> None:
        self.batch, self.samples = problem.batch, samples_of(problem.batch) * world.size
        train = TrainConfig(steps=1, global_batch=self.samples)
        config = Config(name="bench", task="bench:step", train=train, reduce=reduce, parallel=parallel)
        settings = StepSettings(train, parallel, reduce, used=config.features())
        self.framework = problem.open(world, settings, ReducerChoice(reduce, world, chosen))
        self.weights_hash, self.close = self.framework.weights_hash, self.framework.close

    def step(self) -> None:
        self.framework.set_learning_rate(1.0)
        self.framework.step([self.batch], self.samples)


@dataclass(frozen=True)
class Contenders:
    """Makes contenders by name; the choice of ``auto`` for a model is kept for later turns."""

    problem: Callable[[str, World], BenchProblem]
    """Makes a new model by name."""
    world: World
    compression: Any
    """Compression that ``auto`` may choose."""
    others: Mapping[str, Callable[[str], Contender]] = field(default_factory=dict)
    """Further contenders, made from a model's name."""
    chosen: dict[str, str | None] = field(default_factory=dict)

    def make(self, contender: str, model: str) -> Contender:
        """Makes a contender with a new model."""
        if contender in self.others:
            return self.others[contender](model)
        world = alone() if contender == "none" else self.world
        kind = contender if contender in ("auto", "horovod", "mpi") else "auto"
        reduce = ReduceConfig(kind=kind, compression=self.compression if contender == "auto" else "none")  # type: ignore[arg-type]
        way = None if contender in CONTENDERS else Candidate.parse(contender).name
        ours = Ours(
            self.problem(model, self.world),
            world,
            reduce,
            ParallelConfig(),
            self.chosen.get(model) if contender == "auto" else way,
        )
        if contender == "auto":
            ours.step()
            self.chosen[model] = ours.framework.facts.reducer_name
        return ours


def our_contenders(args: argparse.Namespace, world: World) -> Contenders:
    """Contenders of ``torch`` or ``tensorflow``, with OMP_NUM_THREADS threads."""
    if args.framework == "torch":
        from hpctrain.backends.torch.torch_bench_models import problem

        return Contenders(problem, world, args.compression)
    from hpctrain.backends.tensorflow.keras_bench_models import problem as keras_problem
    from hpctrain.backends.tensorflow.runtime import choose_gpu
    from hpctrain.tasks.tf_environment import set_environment

    set_environment(threads=None)
    choose_gpu(world.local_rank)
    return Contenders(keras_problem, world, args.compression)


def time_contenders(make_contenders: Callable[[argparse.Namespace, World], Contenders]) -> None:
    """The program on the ranks: contenders take turns, and rank 0 writes the rows. Independent of the framework."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--framework", "--out", *(f"--{option}" for option in OPTIONS)):
        parser.add_argument(name, required=True)
    args = parser.parse_args()
    world, names = connect(), args.contenders.split(",")
    contenders = make_contenders(args, world)
    found = []
    for model in args.models.split(","):
        make = partial(contenders.make, model=model)
        times, equal = take_turns(names, make, int(args.rounds), int(args.steps), world.data)
        limit = times.get("none")
        found += [
            BenchRow(
                args.framework,
                model,
                name,
                round(seconds * 1e3, 3),
                round(seconds / limit, 4) if limit else None,
                equal[name],
                contenders.chosen.get(model) if name == "auto" else None,
            )
            for name, seconds in times.items()
        ]
    if world.rank == 0:
        write_rows(args.out, [asdict(row) for row in found])


if __name__ == "__main__":
    time_contenders(our_contenders)
