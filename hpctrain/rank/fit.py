"""Training on one rank: ``hpctrain train`` as a function."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext

from hpctrain.backends.torch.strategies.pipeline.stage_schedule import BY_PARAMETERS
from hpctrain.config.sections import Config
from hpctrain.errors import RunFailed
from hpctrain.monitor.rank_monitor import start as start_monitor
from hpctrain.rank import wiring
from hpctrain.rank.batches import first_batch, first_pair, first_validation, make_data
from hpctrain.rank.kept_choices import kept_reducer, note_data, note_nccl, stage_choice
from hpctrain.rank.problem import make_problem, require_same_data
from hpctrain.rank.session import PeerFailed, RankResult, Session, attend
from hpctrain.system import foreign_text
from hpctrain.system.output import kept_output
from hpctrain.track.sink import Sink
from hpctrain.train.evaluation import even_batches
from hpctrain.train.hooks import Hook
from hpctrain.train.loop import RunSummary


def fit(
    config: Config,
    *,
    hooks: Sequence[Hook] = (),
    sinks: Sequence[Sink] = (),
    fresh: bool = False,
    verbose: bool = False,
) -> RunSummary:
    """Trains as ``hpctrain train`` does, with run folder, checkpoints, resume, monitor, stop requests and last words.

    This process is one rank. Run the program by itself, or under mpirun or srun with this call on every rank. Call it
    from the main thread. During training, signals such as Ctrl-C and SIGTERM save a checkpoint and end the run. With
    several ranks, standard error and the standard output of all ranks but 0 go to the ranks' logs; the streams are
    restored once training has ended without an error.

    Args:
        config: the run's configuration; see ``load_config``. The task is imported from the module or file it names.
        hooks: attached to the loop after hpctrain's own; see ``Hook``. Their state is part of checkpoints.
        sinks: receive the run's events; only rank 0's are used.
        fresh: put existing checkpoints aside and start from the beginning.
        verbose: do not redirect output, and show the libraries' messages.

    Returns:
        How the attempt ended, and the last validation metrics. After a stop request (``StopReason.REQUESTED``) the same
        call resumes from the checkpoint that was saved.

    Raises:
        HpctrainError: the error that ended the run, the same on all ranks: ``UserError`` if something must be corrected
            first, ``NoRequeue`` if another attempt is pointless, ``RunFailed`` otherwise. Errors of the task's own code
            pass through on the rank where they arise.
    """
    summaries: list[RunSummary] = []

    def body(session: Session) -> RankResult:
        summary, outcome = train(session, config, hooks, sinks, fresh)
        summaries.append(summary)
        return outcome

    with kept_output():
        error = attend(body, verbose, raises=True).error
        if isinstance(error, PeerFailed):
            raise RunFailed(str(error), "see that rank's message, or its log in the run folder") from error
        if error is not None:
            raise error
    return summaries[0]


def train(
    session: Session, config: Config, hooks: Sequence[Hook] = (), sinks: Sequence[Sink] = (), fresh: bool = False
) -> tuple[RunSummary, RankResult]:
    """Builds everything from the configuration and trains to the end of the loop. Collective."""
    session.join_run(config, fresh)
    session.arrange(config.parallel.tensor, config.parallel.pipeline)
    with session.phase("make the task"):
        problem = make_problem(config, session.world, session.verbose)
    require_same_data(problem, session.world)
    note_data(problem, session)
    with ExitStack() as stack:
        monitor = stack.enter_context(closing(start_monitor(session.world, session.folder.path, config.monitor)))
        watched = wiring.watched_collectives(problem.task, monitor, session, config.monitor)
        stack.enter_context(closing(watched) if watched else nullcontext())
        reducer = kept_reducer(session)
        stages = stage_choice(problem, session) if config.parallel.pipeline > 1 else BY_PARAMETERS
        framework = wiring.make_framework(config, session.world, problem.task, monitor.clock, reducer, stages)
        stack.enter_context(closing(framework))
        wiring.save_memory_when_full(framework, session)
        note_nccl(framework.facts.nccl, session)
        with session.phase("try the task on one batch"):
            batch = first_batch(problem, session.world)
            validation = first_validation(problem)
            for one, _ in even_batches([batch] if batch else [], framework.sync_group):
                framework.dry_call(one, validation, first_pair(problem, batch))
        if session.world.rank == 0 and batch:
            foreign_text.show(problem.described(batch))
            for sentence in framework.facts.advice:
                session.warn(sentence)
        data = stack.enter_context(closing(make_data(problem, session.world, framework.host.place)))
        made = wiring.make_hooks(config, session, problem, monitor, hooks, sinks, fresh, data)
        attached = [stack.enter_context(closing(hook)) for hook in made]
        trainer = wiring.make_trainer(config, session.world, problem, framework, monitor.clock, attached, data)
        try:
            summary = trainer.fit()
        except Exception:
            session.reached(trainer.state.step)
            raise
        return summary, RankResult(summary.reason, summary.step, framework.weights_hash())
