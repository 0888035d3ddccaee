"""Explains what ended a run, or what slows it, in one paragraph from the evidence in its folder.

Rules are tried in order, and the first that finds its evidence answers. If none does, the answer is ``unknown``. Rules
decide by codes; the text for people is made here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from hpctrain.errors import Code
from hpctrain.report.summary import last_step, phase_share
from hpctrain.run import events
from hpctrain.run.decision import blame
from hpctrain.run.grid import Grid
from hpctrain.run.history import RunHistory
from hpctrain.run.last_words import AttemptWords
from hpctrain.run.run_status import Outcome, RunState, Word
from hpctrain.run.time_account import SHORT_S
from hpctrain.run.verdict import RunVerdict

DATA_BOUND = 0.2
"""Fraction of the time spent waiting for data above which a run is data-bound."""
EXCHANGE_BOUND = 0.3
"""Fraction of the time spent exchanging gradients above which a run is exchange-bound."""
REHEARSED = ("to_device", "forward", "backward", "exchange")
"""Phases of a trial step of ``reduce.kind: auto``."""
PROMISED = 1.3
"""Factor by which a step must exceed the trial steps to be named."""
SHOWN = 4
"""Most recoveries that are listed."""
COSTLY = 0.05
"""Fraction of the run's time that a straggler must cost to be named."""


@dataclass(frozen=True)
class Explanation:
    """What ended or slows a run."""

    cause: Code
    """The cause as a code, for scripts."""
    title: str
    """What happened, in one sentence."""
    evidence: tuple[str, ...] = ()
    """Evidence from the run folder."""
    advice: str = ""
    """What to do next."""
    findings: tuple[str, ...] = field(default=())
    """Further things worth knowing, such as a slow rank in a completed run."""
    cost: float = 0.0
    """Fraction of the run's time that it costs, if that is known: what costs most is said first."""

    @property
    def text(self) -> str:
        """Evidence, advice and findings as running text."""
        parts = [*self.evidence, *([self.advice] if self.advice else []), *self.findings]
        return " ".join(_capital(part) + ("" if part.endswith((".", "!", "?")) else ".") for part in parts if part)


def explain(data: RunHistory, state: RunState | None = None) -> Explanation:
    """Applies the first matching rule, and adds what slows the run as further findings.

    Args:
        data: the run.
        state: its state, including from Slurm and live processes; by default from its folder only.
    """
    found = next((answer for rule in RULES if (answer := rule(data)) is not None), None)
    if found is not None and found.cause is Code.COMPLETED:
        state = None  # the state of its job no longer matters
    if state is not None and state.code is Code.TIME_LIMIT and newest_failure(data) is None:
        found = None  # at the limit, ranks die or fall silent
    if found is None:
        found = (by_standing(data, state) if state else by_life(data)) or unknown(data, state)
    elif state is not None and state.word is Word.PENDING:
        return replace(found, findings=(f"it will resume: {state.why}", *([state.fix] if state.fix else [])))
    slow = sorted((finding for rule in SLOW for finding in rule(data)), key=lambda finding: -finding.cost)
    recovered = recoveries(data)
    if found.cause in (Code.COMPLETED, Code.RUNNING) and slow:
        first = slow[0]
        title = found.title.rstrip(".") + "; " + first.title[0].lower() + first.title[1:]
        cause = first.cause if found.cause is Code.RUNNING else found.cause
        rest = (*(finding.title for finding in slow[1:]), *recovered)
        return Explanation(cause, title, (*found.evidence, *first.evidence), first.advice or found.advice, rest)
    findings = (*(finding.title for finding in slow), *recovered)
    return Explanation(found.cause, found.title, found.evidence, found.advice, findings)


# What ended the run


TITLES: Mapping[Code, str] = {
    Code.NAN: "The loss became NaN or infinite",
    Code.SINGLETONS: "Each rank started alone (no common MPI job)",
    Code.DISK_FULL: "A disk was full",
    Code.READ_ONLY: "A file system cannot be written",
    Code.UNREADABLE_CHECKPOINT: "A checkpoint cannot be read at the moment",
    Code.DAMAGED_CHECKPOINT: "No intact checkpoint was found",
    Code.HOROVOD: "Horovod cannot be used",
    Code.OUT_OF_MEMORY: "Memory ran out",
    Code.NETWORK: "A network connection failed",
    Code.IN_USE: "Another live run holds the run folder",
    Code.PREFLIGHT: "The job could not begin",
    Code.KILLED: "A rank was killed",
    Code.NODE: "A node failed",
    Code.HANG: "The run hung",
    Code.VANISHED: "A rank ended without saying why",
    Code.STOP: "The ranks did not stop in time",
    Code.TIME_LIMIT: "The run stopped because its time limit was near",
    Code.STOPPED: "The run was asked to stop",
    Code.USER_ERROR: "The run file, its data or its environment is wrong",
    Code.NO_PROGRESS: "Attempts made no progress",
    Code.EXCEPTION: "A rank failed with an error",
}
"""Titles of failure codes."""
GENERAL = (Code.USER_ERROR, Code.EXCEPTION, Code.NO_PROGRESS, Code.UNKNOWN)
"""Failure codes that are less specific than a hang reported by the monitor."""


def newest_failure(data: RunHistory) -> RunVerdict | None:
    """The verdict on the newest attempt if it failed; None if it succeeded or has not ended."""
    newest = data.run.newest
    if newest is None:
        return None
    words = data.run.words.get(newest.number)
    verdict = newest.verdict or (words and (words.verdict or _own_verdict(words, newest.grid)))
    return verdict if verdict and verdict.is_failure else None


def _own_verdict(words: AttemptWords, grid: Grid) -> RunVerdict | None:
    """A verdict from the ranks' exit records, if no supervisor survived to write one."""
    failed = [word for word in words.ranks if word.error]
    return blame(failed, grid) if failed else None


def newest_hang(data: RunHistory) -> events.Hang | None:
    """The last hang that the monitor reported in the newest attempt."""
    newest = data.run.newest
    seen = [event for event in data.all(events.Hang) if newest and event.attempt == newest.number]
    return seen[-1] if seen else None


def by_cause(data: RunHistory) -> Explanation | None:
    """A failure with a specific cause."""
    failure = newest_failure(data)
    if failure is None or failure.code in GENERAL:
        return None
    hang = newest_hang(data)
    return _of_failure(data, failure, [hang.text] if hang and hang.text not in failure.reason else [])


def by_hang(data: RunHistory) -> Explanation | None:
    """A hang that the monitor reported, if the attempt failed or has not ended."""
    hang = newest_hang(data)
    if hang is None or data.run.outcome not in (Outcome.FAILED, Outcome.RUNNING, Outcome.UNKNOWN):
        return None
    said = hang.sentence or f"no step completed after step {hang.step}"
    return Explanation(
        Code.HANG, "The run hangs", (said,), "look at the stacks in monitor/, then hpctrain stop or cancel it"
    )


def by_failure(data: RunHistory) -> Explanation | None:
    """Any other failure: a user error, an exception, or a cause without a code."""
    failure = newest_failure(data)
    return _of_failure(data, failure) if failure else None


def by_stop(data: RunHistory) -> Explanation | None:
    """A stop on request, by a person or because of the time limit."""
    if data.run.outcome not in (Outcome.STOPPED_BY_RANKS, Outcome.STOPPED):
        return None
    newest = data.run.newest
    verdict = newest.verdict if newest else None
    seen = [event for event in data.all(events.StopRequested) if newest is None or event.attempt == newest.number]
    request = seen[-1] if seen else None
    requested = Code.read(request.code) if request else Code.UNKNOWN
    timed = Code.TIME_LIMIT in (requested, verdict.code if verdict else Code.UNKNOWN)
    code = Code.TIME_LIMIT if timed else Code.STOPPED
    if request is not None:
        where = f"the ranks stopped after step {request.step}, as asked by {request.by or 'a request'}"
    else:  # before the first step, no events are written
        where = (verdict.reason if verdict else "") or "a request was seen"
    saved = data.last(events.CheckpointSaved)
    kept = f"the newest checkpoint is from step {saved.step}" if saved else "no checkpoint was saved"
    return Explanation(code, TITLES[code], (where, kept), "the same command resumes from there")


def by_completion(data: RunHistory) -> Explanation | None:
    """A run that ended as planned."""
    reached = data.run.outcome
    if reached not in (Outcome.COMPLETED, Outcome.EARLY, Outcome.DONE):
        return None
    finished = data.last(events.RunFinished)
    is_early = reached is Outcome.EARLY
    title = "The run ended early: its metric no longer improved" if is_early else "The run completed"
    attempts = len(data.run.attempts) or 1
    reached_step = f"it reached step {finished.step}" if finished else "its command succeeded"
    evidence = f"{reached_step} in {attempts} attempt{'s' if attempts > 1 else ''}"
    return Explanation(Code.COMPLETED, title, (evidence,))


def by_life(data: RunHistory) -> Explanation | None:
    """A run that is still running."""
    if data.run.outcome is not Outcome.RUNNING or not data.train:
        return None
    steps = data.run.unsaved_steps
    evidence = (
        "" if steps is None else f"the newest checkpoint is from step {data.run.checkpoint_step}, {steps} steps ago"
    )
    return Explanation(Code.RUNNING, "The run is under way", (evidence,) if evidence else ())


STANDING = {
    Word.RUNNING: "The run continues",
    Word.PENDING: "The run has not begun",
    Word.CANCELLED: "The run's job was cancelled",
    Word.FAILED: "The run's job failed",
    Word.NOT_STARTED: "The run was not started",
}
"""Titles for runs whose state is known from their jobs."""
FIXES = {
    Word.CANCELLED: "hpctrain resume submits it again",
    Word.FAILED: "look at the job's own log: hpctrain logs {run} --rank job",
    Word.NOT_STARTED: "start it with hpctrain run or hpctrain submit",
}


def by_standing(data: RunHistory, state: RunState) -> Explanation | None:
    """The job's state, for a run that has no recorded end or has not begun."""
    if state.word not in STANDING:
        return None
    fix = state.fix or FIXES.get(state.word, "").format(run=data.run.path)
    code = Code.RUNNING if state.word is Word.RUNNING else state.code
    title = "The run waits to continue" if state.word is Word.PENDING and data.train else STANDING[state.word]
    return Explanation(code, title, (state.why,) if state.why else (), fix)


def unknown(data: RunHistory, state: RunState | None = None) -> Explanation:
    """No evidence, or a verdict without a code, whose reason is then shown."""
    newest = data.run.newest
    if newest and newest.verdict and newest.verdict.reason:
        verdict = newest.verdict
        return Explanation(Code.UNKNOWN, "The newest attempt has ended", (verdict.reason,), verdict.fix.rstrip("."))
    evidence = state.why if state else ""
    if not evidence:
        records = {"events": data.counts, "attempts": data.run.attempts, "exit records": data.run.words}
        missing = [name for name, found in records.items() if not found]
        evidence = "nothing in the run folder says how it ended"
        if missing:
            evidence = f"the run folder has no {', no '.join(missing)}"
    title = "It is unknown what ended this run"
    fix = "look at the job's own log and at logs/"
    return Explanation(Code.UNKNOWN, title, (evidence,), fix)


# What slows the run


def stragglers(data: RunHistory) -> list[Explanation]:
    """The monitor's three costliest findings, of at least COSTLY; a spell that is over counts for its steps only."""
    found: dict[tuple[object, ...], list[tuple[float, str]]] = defaultdict(list)
    for event, until in _spells(data):
        cost, about = event.cost or 0.0, event.text
        if until is not None:
            cost *= max(until - event.step, 0) / max(last_step(data), 1)
            about = f"from step {event.step} to {until}, {about}"
        found[event.kind, event.rank, event.cause].append((cost, about))
    costs = []
    for spells in found.values():
        _, of_costliest = max(spells, key=itemgetter(0))
        costs.append((sum(cost for cost, _ in spells), of_costliest))
    costs.sort(reverse=True)
    return [Explanation(Code.STRAGGLER, _capital(about), cost=cost) for cost, about in costs[:3] if cost >= COSTLY]


def _spells(data: RunHistory) -> list[tuple[events.Straggler, int | None]]:
    """Confirmed findings and the step at which each ended; None if it lasted to the end of the newest attempt.

    Findings in steps that a later attempt repeated are left out.
    """
    held: dict[tuple[object, ...], events.Straggler] = {}
    spells: list[tuple[events.Straggler, int | None]] = []
    for event in data.rare:
        if isinstance(event, events.Straggler):
            if event.about in held:
                spells.append((held.pop(event.about), event.step))
            if event.state == "confirmed":
                held[event.about] = event
        elif isinstance(event, (events.RunStarted, events.Resumed)):
            for about, finding in list(held.items()):
                if finding.attempt < event.attempt:
                    spells.append((held.pop(about), event.step))
            spells = [(finding, until) for finding, until in spells if finding.step < event.step]
    return [*spells, *((finding, None) for finding in held.values())]


def phases(data: RunHistory) -> list[Explanation]:
    """Findings about time not spent computing."""
    if not _is_measured(data):
        return []
    share, found = phase_share(data) or {}, []
    if share.get("data", 0) > DATA_BOUND:
        advice = "raise data.workers or data.prefetch_batches, or pack the data contiguously with hpctrain data pack"
        title = f"{share['data']:.0%} of the time is spent waiting for data"
        found.append(Explanation(Code.DATA_BOUND, title, (), advice, cost=share["data"]))
    if share.get("exchange", 0) > EXCHANGE_BOUND:
        advice = "use a larger batch per rank, train.accumulate, or reduce.compression: fp16; see hpctrain bench step"
        title = f"{share['exchange']:.0%} of the time is spent exchanging gradients"
        found.append(Explanation(Code.EXCHANGE_BOUND, title, (), advice, cost=share["exchange"]))
    return found


def exchanges(data: RunHistory) -> list[Explanation]:
    """Gradients of GPUs that go through host memory; and steps much longer than the trial steps of ``auto``."""
    last = data.run.progress.newest(events.Train)
    started = data.last(events.RunStarted)
    spent = last.seconds_per_step() if last else {}
    found = list[Explanation]()
    exchange = spent.get("exchange", 0.0)
    step = sum(spent.get(phase, 0.0) for phase in REHEARSED)
    host_s = started.through_host_s if started else None
    if host_s:
        title = f"gradients of GPUs go through host memory: about {host_s:.2g} s per update"
        advice = "start one rank per GPU, and leave reduce.kind out"
        found.append(Explanation(Code.EXCHANGE_BOUND, title, (), advice, cost=host_s / max(host_s, step)))
    name = data.run.reducer.get("reducer")
    seconds = data.run.reducer.get("seconds")
    trial_s = seconds.get(name) if isinstance(seconds, dict) else None
    if not _is_measured(data):
        return found
    if isinstance(trial_s, float) and step > PROMISED * trial_s > 0 and exchange > step - trial_s:
        title = f"a step takes {step:.2g} s, of which the exchange {exchange:.2g} s; trial steps took {trial_s:.2g} s"
        advice = f"compare {name} with others by hpctrain bench step; resumes keep it unless reduce.kind names another"
        found.append(Explanation(Code.EXCHANGE_BOUND, title, (), advice, cost=(step - trial_s) / step))
    return found


def failed_checkpoints(data: RunHistory) -> list[Explanation]:
    """Checkpoints that could not be written."""
    failed = data.last(events.CheckpointFailed)
    if not failed:
        return []
    count = data.counts.get(events.CheckpointFailed.NAME, 1)
    which = "1 checkpoint" if count == 1 else f"{count} checkpoints"
    title = f"{which} could not be written, the last at step {failed.step}: {failed.error}"
    saved = data.last(events.CheckpointSaved)
    in_a_row = failed.failures or 1
    evidence: tuple[str, ...] = ()
    if not saved or saved.time < failed.time:
        newest = f"the newest one is from step {saved.step}" if saved else "there is none"
        times = f"the last {in_a_row} attempts to save failed" if in_a_row > 1 else "none has been saved since"
        evidence = (f"{times}, and {newest}: what was trained since is not saved",)
    return [Explanation(Code.CHECKPOINT_FAILED, title, evidence, "free space in the run folder", cost=1.0)]


Rule = Callable[[RunHistory], Explanation | None]
RULES: tuple[Rule, ...] = (by_cause, by_hang, by_failure, by_stop, by_completion)
SLOW = (stragglers, failed_checkpoints, phases, exchanges)


def recoveries(data: RunHistory) -> list[str]:
    """Describes failures that the run survived, newest last, and its goodput; empty if there were none."""
    recovered, account = data.all(events.Recovered), data.run.account
    if not recovered:
        return []
    first = [f"recovered {len(recovered)} times; the last {SHOWN}"] if len(recovered) > SHOWN else []
    goodput = [f"goodput {account.text}"] if account.text else []
    return [*first, *(event.text for event in recovered[-SHOWN:]), *goodput]


def _of_failure(data: RunHistory, failure: RunVerdict, more: Sequence[str] = ()) -> Explanation:
    said = failure.reason
    if failure.rank is not None and data.run.newest and f"rank {failure.rank}" not in said:
        host = f" on {failure.host}" if failure.host else ""
        place = data.run.newest.grid.label(failure.rank)
        said = f"rank {failure.rank}{place}{host}, attempt {data.run.newest.number}: {said}"
    return Explanation(failure.code, TITLES.get(failure.code, "The run failed"), (said, *more), failure.fix.rstrip("."))


def _is_measured(data: RunHistory) -> bool:
    return sum(float(series.value.sum()) for series in data.phases.values()) >= SHORT_S


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
