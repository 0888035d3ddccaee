"""``hpctrain train``, ``evaluate`` and ``predict``, as one rank runs them, alone or with others."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.config.loading import add_run_file, dump, load
from hpctrain.errors import UserError
from hpctrain.rank.session import RankResult, Session, attend
from hpctrain.run.folder import RunDir
from hpctrain.run.resolve_run import configured, step
from hpctrain.system import foreign_text
from hpctrain.system.output import say
from hpctrain.train.hooks import StopReason

if TYPE_CHECKING:
    from hpctrain.config.sections import Config
    from hpctrain.data.dataset import Dataset
    from hpctrain.rank.problem import Problem
    from hpctrain.train.framework import Framework


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the parser's command."""
    add_run_file(parser, *["run file or run folder"] * (parser.get_default("command") != "train"))
    parser.add_argument("--verbose", action="store_true", help="also show the output of libraries")
    if parser.get_default("command") == "train":
        parser.add_argument("--print-config", action="store_true", help="print the resolved run file and exit")
        parser.add_argument("--fresh", action="store_true", help="put existing checkpoints aside and start over")
        parser.add_argument("--trial", action="store_true", help=argparse.SUPPRESS)  # for doctor: up to the first step
        return
    parser.add_argument("--step", type=step, help="checkpoint to use, a step or best; by default the newest intact one")
    command = parser.get_default("command")
    default = "by default the task's validation data"
    parser.add_argument("--data", help=f"data to {command} over, with the arrays of the training data; {default}")
    if command == "evaluate":
        parser.add_argument("--json", action="store_true", help="print JSON")
    else:
        parser.add_argument("-o", "--output", help="HDF5 file; by default <run folder>/predictions.h5")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns an exit code."""
    if args.command == "train" and args.print_config:
        foreign_text.show(dump(load(args.run_file, args.overrides, say)), end="")
        return 0
    body = {"train": train, "evaluate": evaluate, "predict": predict}[args.command]
    return attend(lambda session: body(args, session), args.verbose).exit_code


def train(args: argparse.Namespace, session: Session) -> RankResult:
    """Trains, from the run file to the end of the loop."""
    from hpctrain.rank.fit import train as train_rank
    from hpctrain.rank.trial import tried

    alone = session.world.rank == 0 and not session.supervised  # otherwise the supervisor has printed it
    with session.phase("read the run file"):
        config = load(args.run_file, args.overrides, *[say] * alone)
    if args.trial:
        session.arrange(config.parallel.tensor, config.parallel.pipeline)
        tried(config, session.world, session.phase)
        return RankResult(StopReason.COMPLETED, 0)
    _, outcome = train_rank(session, config, fresh=args.fresh)
    return outcome


def evaluate(args: argparse.Namespace, session: Session) -> RankResult:
    """Computes loss and metrics of a checkpoint over the validation data or ``--data``; rank 0 prints them."""
    from hpctrain.rank.batches import make_validation_sets
    from hpctrain.run.figures import as_json
    from hpctrain.train.evaluation import evaluate as evaluate_over_ranks

    with load_trained(args, session) as (config, framework, problem, step):
        if args.data:
            with session.phase("open the data to evaluate over"):
                dataset = open_given(args.data, problem)
            if missing := [name for name in problem.train.fields if name not in dataset.fields]:
                fix = "loss and metrics may need all arrays of the training data; hpctrain predict needs fewer"
                raise UserError(f"{args.data} has no {', '.join(missing)}", fix)
            problem = dataclasses.replace(problem, validation={"validation": dataset})
        if not problem.validation:
            fix = "name data with --data, or return TorchTask(..., validation=...)"
            raise UserError(f"task {config.task} has no validation data", fix)
        sets = make_validation_sets(problem, session.world, framework.host.place)
        found = evaluate_over_ranks(framework, sets, session.world.data)
        if session.world.rank == 0:
            metrics = found.metrics
            values = {"step": step, "metrics": metrics}
            if found.figures:
                values["figures"] = {name: as_json(figure) for name, figure in found.figures.items()}
            plain = "\n".join([f"step {step}", *(f"{name} {value:.6g}" for name, value in metrics.items())])
            foreign_text.show(json.dumps(values) if args.json else plain)
        return RankResult(StopReason.COMPLETED, step)


def predict(args: argparse.Namespace, session: Session) -> RankResult:
    """Writes a checkpoint's outputs for every sample, in stored order, to one HDF5 file."""
    from hpctrain.rank.batches import make_validation
    from hpctrain.rank.predictions import write_predictions

    with load_trained(args, session) as (config, framework, problem, step):
        with session.phase("open the data to predict over"):
            dataset = next(iter(problem.validation.values()), None)
            if args.data:
                dataset = open_given(args.data, problem)
            if dataset is None:
                raise UserError(f"task {config.task} has no validation data", "name a data set with --data FILE")
        data = make_validation(problem, session.world, dataset, framework.host.place)
        path = Path(args.output or RunDir.of(config.name, config.run_dir).path / "predictions.h5")
        writes = session.world.tensor.rank == 0 and session.world.pipeline.rank == 0
        write_predictions(framework, data, session.world.data, path, writes)
        if session.world.rank == 0:
            foreign_text.show(f"{len(dataset)} predictions of step {step} in {path}")
        return RankResult(StopReason.COMPLETED, step)


def open_given(source: str, problem: Problem) -> Dataset:
    """Opens the data of ``--data``, with those of the training data's arrays that it has. Raises UserError."""
    from hpctrain.data.formats.sources import decode_of, open_dataset

    decode = decode_of(problem.train)
    dataset = open_dataset(source, decode=decode)
    shared = [name for name in problem.train.fields if name in dataset.fields]
    return open_dataset(source, shared, decode=decode) if shared else dataset


@contextmanager
def load_trained(args: argparse.Namespace, session: Session) -> Iterator[tuple[Config, Framework, Any, int]]:
    """Yields config, framework with a checkpoint's weights, problem, and the checkpoint's step. Writes nothing."""
    from hpctrain.checkpoint.store import CheckpointStore, load_weights
    from hpctrain.rank import wiring
    from hpctrain.rank.problem import make_problem
    from hpctrain.train.clock import IntervalClock
    from hpctrain.train.stateful import kept_state

    with session.phase("read the run file"):
        config, run_dir = configured(args.run_file, args.overrides)
        # No gradients are exchanged here, so no reducer is needed.
        config = dataclasses.replace(config, reduce=dataclasses.replace(config.reduce, kind="auto", compression="none"))
    session.arrange(config.parallel.tensor, config.parallel.pipeline)
    folder = run_dir.checkpoints
    store = CheckpointStore(folder, group=session.world.everyone, peers=session.world.data)
    store.candidates(args.step)  # fail early, before a framework is imported
    with session.phase("make the task"):
        problem = make_problem(config, session.world, session.verbose)
    framework = wiring.make_framework(config, session.world, problem.task, IntervalClock())
    with closing(framework):
        kept, keys = kept_state(problem.task.state), config.checkpoint
        loaded = load_weights(framework, store, args.step, kept, session.world.everyone, keys.accept, keys.init_from)
        yield config, framework, problem, loaded.step
