"""Statistics of slowness: pure functions over arrays of seconds, [R] over ranks or [R, S] over ranks and steps.

In synchronous training every rank's step takes as long as the slowest one's, so step times cannot show who is slow.
Busy times do: ``busy(k) = arrival(k) - exit(k - 1)`` on the rank's own clock.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from hpctrain.monitor.window import BUSY, CAUSES, GC
from hpctrain.system.array_types import Bools, Ints, Reals
from hpctrain.train.clock import Phase

MAD_TO_SIGMA = 1.4826
"""Sigma of a normal distribution over its median absolute deviation."""
SCALE_FLOOR = 0.01
"""Differences between ranks below this share of the median are never significant."""
MEDIAN_ERROR = 1.2533
"""Standard error of a median divided by that of a mean, for normal noise: sqrt(pi / 2)."""
POWERS = (1.0, 0.5, 1.5, 2.0, 3.0)
"""Powers of work that time may follow: 1 for most layers, 2 for attention over a sequence."""
TYPICAL_NOISE = 0.05
"""Spread of the steps of equal batches: what it costs stays when batches are made equal."""
EVEN_NOISE = 0.15
"""Largest spread of equal batches: healthy steps spread by up to 10%, which a window of 8 ranks measures to 1.4%."""


def median_of_others(values: Reals) -> Reals:
    """[R] for each rank, the median of all other ranks (R >= 2)."""
    n = len(values)
    order = np.argsort(values, kind="stable")
    place = np.empty(n, dtype=np.int64)
    place[order] = np.arange(n)
    ordered: Reals = values[order]
    low, high = (n - 2) // 2, (n - 1) // 2
    median: Reals = (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2
    return median


def excess_of_each(values: Reals) -> Reals:
    """[R] fraction by which each rank's value is above the median of the others."""
    others = median_of_others(values)
    return (values - others) / np.maximum(others, 1e-9)


def robust_z(medians: Reals, busy: Reals, between: bool = True) -> Reals:
    """[R] distance of each rank's median from the others' in robust standard deviations.

    The scale is the largest of: the spread between ranks (median absolute deviation), the error of one rank's median
    over the window, and a floor. The first fails for few ranks, the second for noise that lasts longer than a step.

    Args:
        medians: [R] each rank's median over the window.
        busy: [R, S] the window itself.
        between: whether there are enough ranks to use the spread between them.
    """
    centre = float(np.median(medians))
    spread = MAD_TO_SIGMA * float(np.median(np.abs(medians - centre))) if between else 0.0
    deviations = np.median(np.abs(busy - medians[:, None]), axis=1)
    within = MEDIAN_ERROR * MAD_TO_SIGMA * deviations / math.sqrt(busy.shape[1])
    scale = np.maximum(max(spread, SCALE_FLOOR * centre, 1e-9), within)
    return (medians - median_of_others(medians)) / scale


def cost_of_each(busy: Reals, wait: Reals) -> Reals:
    """[R] fraction of the window saved if this rank were no slower than the slowest other rank in every step.

    ``sum_k(max_j busy_j - max_{j != r} busy_j) / sum_k step``: the what-if of a job without the rank's delay.
    """
    top = busy.max(axis=0)
    first = busy.argmax(axis=0)
    second = np.partition(busy, -2, axis=0)[-2]
    saved = np.zeros(len(busy))
    np.add.at(saved, first, top - second)
    return saved / step_seconds(busy, wait)


def cost_of_group(busy: Reals, wait: Reals, members: Bools) -> float:
    """Fraction of the window saved if these ranks were no slower than the slowest of the rest in every step."""
    if members.all():
        return 0.0
    rest = busy[~members].max(axis=0)
    return float(np.maximum(busy.max(axis=0) - rest, 0).sum() / step_seconds(busy, wait))


def step_seconds(busy: Reals, wait: Reals) -> float:
    """Seconds that the window took: the median over ranks of busy plus wait."""
    return max(float(np.median((busy + wait).sum(axis=1))), 1e-9)


def work_explains(busy: Reals, work: Reals) -> Reals:
    """[R, S] seconds of each busy time explained by more (or less) work than in the typical step.

    If work varies from step to step, time follows the power of it that fits best, see ``fit_work``. If it does not
    vary, time is assumed proportional to work, and only work above the median is credited.
    """
    centre = float(np.median(work))
    if centre <= 0 or not np.isfinite(work).all() or float(np.ptp(work)) == 0:
        return np.zeros_like(busy)
    if varies(work):
        power, slope = fit_work(busy, work)
        return np.float64(slope) * ((np.maximum(work, 0) / centre) ** power - 1)
    excess: Reals = np.maximum(work - centre, 0)
    return float(np.median(busy)) / centre * excess


def varies(work: Reals) -> bool:
    """Whether ranks' work changes from step to step, by more than 1% of the median."""
    return float(np.std(work - work.mean(axis=1, keepdims=True))) > 0.01 * float(np.median(work)) > 0


def fit_work(busy: Reals, work: Reals) -> tuple[float, float]:
    """Fits busy times to powers of work, within ranks, so that a slow rank is not mistaken for a loaded one.

    Returns:
        The power that fits best, and the seconds of the median work; (0, 0) if none explains 30% of the variance.
    """
    units = np.maximum(work, 0) / np.median(work)
    longest = 3 * np.maximum(units, 1) ** max(POWERS)  # longer is a pause, whatever the power
    calm = np.minimum(busy, longest * np.median(busy, axis=1, keepdims=True))
    db = calm - calm.mean(axis=1, keepdims=True)
    bb = float((db * db).sum())
    explained, best = 0.3, (0.0, 0.0)
    for power in POWERS:
        powers = units**power
        dw = powers - powers.mean(axis=1, keepdims=True)
        ww, wb = float((dw * dw).sum()), float((dw * db).sum())
        if wb > 0 and wb * wb > explained * ww * bb:
            explained, best = wb * wb / (ww * bb), (power, wb / ww)
    return best


def uneven_cost(busy: Reals, wait: Reals) -> float:
    """Fraction of the window in which the typical rank waits for the slowest one."""
    return float((busy.max(axis=0) - np.median(busy, axis=0)).sum() / step_seconds(busy, wait))


def cost_of_spread(busy: Reals, wait: Reals) -> float:
    """Fraction of the window saved if each step's work were equal on all ranks: each would take the ranks' mean."""
    return float((busy.max(axis=0) - busy.mean(axis=0)).sum() / step_seconds(busy, wait))


def cost_of_turns(busy: Reals, wait: Reals) -> float:
    """``cost_of_spread`` without typical noise, if ranks take turns at being slowest; 0 if that is noise or pauses.

    The fast steps distinguish them: a light batch makes a step shorter than the rank's median, a pause never does, and
    noise of equal batches shortens it little. Steps that are long on all ranks cost nothing and do not count.
    """
    ranks = len(busy)
    relative = busy / np.maximum(np.median(busy, axis=0), 1e-9)
    spread = spread_below(relative) * math.sqrt(ranks / (ranks - 1))  # the median contains the rank's own share
    if spread <= EVEN_NOISE:
        return 0.0
    largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))  # expected maximum of normal noise (Blom 1958)
    noise = TYPICAL_NOISE * largest * float(busy.mean(axis=0).sum()) / step_seconds(busy, wait)
    return max(cost_of_spread(busy, wait) - noise, 0.0)


def spread_below(busy: Reals) -> float:
    """Standard deviation of the logarithm of a rank's steps, from the lower quartile, so without pauses."""
    own = np.maximum(np.median(busy, axis=1, keepdims=True), 1e-9)
    return -MAD_TO_SIGMA * math.log(max(float(np.quantile(busy / own, 0.25)), 1e-9))


def chance_excess(busy: Reals, z: float) -> float:
    """Fraction by which the median of a rank's steps is larger by chance, at ``z`` standard errors."""
    return math.expm1(z * MEDIAN_ERROR * spread_below(busy) / math.sqrt(busy.shape[1]))


def pauses(busy: Reals) -> tuple[Ints, Reals]:
    """Counts single long steps, which medians do not show.

    A pause is a step longer than 1.5 times the rank's own median in which the rank is also the slowest. Consecutive
    ones count once.

    Returns:
        [R] number of pauses, and [R] seconds by which they held up the others.
    """
    own = np.median(busy, axis=1, keepdims=True)
    if len(busy) > 1:
        second = np.partition(busy, -2, axis=0)[-2]
    else:
        second = np.zeros(busy.shape[1])
    lost = np.where(busy >= busy.max(axis=0), busy - np.maximum(second, own), 0)
    paused = (busy > 1.5 * own) & (lost > 0)
    begins = paused.copy()
    begins[:, 1:] &= ~paused[:, :-1]
    return begins.sum(axis=1), np.where(paused, lost, 0).sum(axis=1)


def chance_of_so_many(count: int, total: int, ranks: int) -> float:
    """Probability that a given rank gets at least ``count`` of ``total`` pauses that hit ranks at random."""
    p = 1 / ranks
    terms = (
        math.lgamma(total + 1)
        - math.lgamma(k + 1)
        - math.lgamma(total - k + 1)
        + k * math.log(p)
        + (total - k) * math.log1p(-p)
        for k in range(count, total + 1)
    )
    return min(1.0, sum(math.exp(term) for term in terms))


def upper_group(medians: Reals, gap: float) -> Bools:
    """[R] ranks above the widest relative gap in the sorted medians, if that gap is at least ``gap``."""
    ordered = np.sort(medians)
    widths = np.diff(ordered) / np.maximum(ordered[:-1], 1e-9)
    below = int(np.argmax(widths))
    return medians > ordered[below] if widths[below] >= gap else np.zeros(len(medians), dtype=bool)


def transfer_seconds(wait: Reals) -> float:
    """Seconds of the exchange itself: median over steps of the smallest wait (the last rank waits for no other)."""
    return float(np.median(wait.min(axis=0)))


COMPUTE = "compute"
"""All phases are equally slower: the processor is slow, not the program."""
MIXED = "mixed"
"""Several phases, but not all."""
NETWORK = "network"
"""The exchange."""

DOMINANT = 0.8
"""Fraction of the excess that one phase must hold to be the cause."""
COMPUTE_PHASES = (Phase.TO_DEVICE, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


def cause_of(extra: Reals, normal: Reals) -> str:
    """Returns the name of the cause.

    A phase that holds 80% of the excess is the cause, unless the rest of the step is slower by a similar factor: a
    throttled or shared processor slows all phases, and the longest one then loses the most seconds.

    Args:
        extra: [len(CAUSES)] seconds per step above the peers.
        normal: [len(CAUSES)] seconds per step of the peers.
    """
    busy = list(BUSY)
    total = float(extra[busy].sum())
    usual = float(normal[busy].sum())
    if total <= 0:
        return MIXED
    if extra[GC] >= DOMINANT * total:
        return CAUSES[GC]
    top = busy[int(np.argmax(extra[busy]))]
    most, usual_top = float(extra[top]), float(normal[top])
    if most >= DOMINANT * total:
        rest = total - most
        slower = most / max(usual_top, 1e-9)
        rest_slower = rest / max(usual - usual_top, 1e-9)
        if rest < 0.1 * total or rest_slower < 0.5 * slower:
            return CAUSES[top]
    large = [column for column in busy if normal[column] >= 0.1 * usual]
    alike = all(extra[column] / normal[column] >= 0.4 * total / max(usual, 1e-9) for column in large)
    if (alike and len(large) > 1) or extra[list(COMPUTE_PHASES)].sum() >= DOMINANT * total:
        return COMPUTE
    return MIXED
