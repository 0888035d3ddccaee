"""Seconds of a step under each plan that shares out a model, from a measured run of whole models. Pure functions."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hpctrain.bench.scaling.fit import ExchangeModel, Link, Shape, ring
from hpctrain.bench.scaling.measured import Measured
from hpctrain.bench.scaling.model import StepModel
from hpctrain.parallel.plan import Plan, Sums, Weighed


@dataclass(frozen=True)
class PlanStep:
    """Where the time of a step goes, on a rank."""

    waits_s: float
    """For data, and in hooks."""
    compute_s: float
    sums_s: float
    """Within the tensor group."""
    messages_s: float
    """Between stages."""
    bubble_s: float
    """For other stages."""
    exchange_s: float
    """With the ranks that see other samples."""

    @property
    def total_s(self) -> float:
        """Of the step."""
        busy = self.waits_s + self.compute_s + self.sums_s + self.messages_s
        return busy + self.bubble_s + self.exchange_s


@dataclass(frozen=True)
class Batch:
    """Of an update."""

    samples: int
    """Of all ranks."""
    micro_batches: int
    """``train.accumulate``."""

    def of_rank(self, data: int) -> int:
        """Samples of the rank that has most, of so many that see different ones."""
        return -(-self.samples // data)


def plan_step(plan: Plan, model: Weighed, batch: Batch, node: int | None, measured: Measured) -> PlanStep | None:
    """What to expect of a step; None if the plan needs a link that was not measured.

    Args:
        plan: what becomes of the ranks.
        model: what a rank has of it, before anything is sharded.
        batch: of an update.
        node: ranks of a node; None if all are on one.
        measured: a run of the same model.
    """
    links, shape = measured.steps.exchange, data_shape(plan, node)
    needed = [links.inside] if plan.tensor > 1 or shape.ranks_per_node > 1 else []
    needed += [links.between] if shape.nodes > 1 else []
    hop = stage_link(plan, node, links)
    if None in needed or (plan.pipeline > 1 and hop is None):
        return None
    samples, micro_batches = batch.of_rank(plan.data), batch.micro_batches
    compute = measured.compute_s(samples) / (plan.tensor * plan.pipeline)
    sums = messages = 0.0
    if plan.tensor > 1 and links.inside:
        sums = sums_s(model.sums, plan.tensor, samples, micro_batches, links.inside) / plan.pipeline
    if plan.pipeline > 1 and hop:
        messages = messages_s(model.handed_on * samples, micro_batches, hop)
    idle = (compute + sums + messages) * (plan.pipeline - 1) / micro_batches
    exchanged = model.exchanged * exchanges(plan.shard, micro_batches)
    exchange = exchange_s(measured.steps, shape, exchanged, plan.tensor)
    if plan.shard == "tables":
        exchange += lookups_s(model.lookups, shape, samples, micro_batches, links)
    return PlanStep(measured.waits_s, compute, sums, messages, idle, exchange)


def data_shape(plan: Plan, node: int | None) -> Shape:
    """Where the ranks are that have the same part of a model and see different samples. The tensor index goes
    fastest."""
    if node is None or plan.data * plan.tensor <= node:
        return Shape(1, plan.data)
    each = max(node // plan.tensor, 1)
    return Shape(-(-plan.data // each), each)


def stage_link(plan: Plan, node: int | None, links: ExchangeModel) -> Link | None:
    """What a stage's messages go over: the memory of a node that has all stages, else the node's own link, at which
    all of its ranks send at once."""
    ranks = plan.tensor * plan.data
    if node is None or ranks * plan.pipeline <= node:
        return links.inside
    return shared(links.between, min(node, ranks))


def shared(link: Link | None, parties: int) -> Link | None:
    """A link of which each of several gets its part."""
    return link and Link(link.alpha_s, link.s_per_byte * parties)


def sums_s(sums: Sums, ranks: int, samples: int, micro_batches: int, link: Link) -> float:
    """Of a step, within a tensor group: rings, as many in each micro-batch, and bytes of all samples."""
    messages, share = ring(ranks)
    return sums.count * micro_batches * messages * link.alpha_s + share * sums.bytes * samples * link.s_per_byte


def lookups_s(lookups: Sums, shape: Shape, samples: int, micro_batches: int, links: ExchangeModel) -> float:
    """Of a step: messages to each other rank one after the other, and rows that are spread evenly over the ranks, over
    the node's link if there are several nodes."""
    link = shared(links.between, shape.ranks_per_node) if shape.nodes > 1 else links.inside
    assert link, "plan_step has seen to it"
    others = shape.ranks - 1
    bytes_of_others = lookups.bytes * samples * others / shape.ranks
    return lookups.count * micro_batches * others * link.alpha_s + bytes_of_others * link.s_per_byte


def messages_s(num_bytes: float, micro_batches: int, link: Link) -> float:
    """Of a step, for a stage: a message forward and one back in each micro-batch, and the bytes of all of them."""
    return 2 * micro_batches * link.alpha_s + num_bytes * link.s_per_byte


def exchanges(shard: str, micro_batches: int) -> float:
    """How often the gradients' bytes travel, beside an allreduce: as often if they are scattered and the parameters
    gathered; if parameters are gathered before each pass, half an allreduce for each of these, and half for sums."""
    return micro_batches + 0.5 if shard == "parameters" else 1.0


def exchange_s(steps: StepModel, shape: Shape, num_bytes: float, parts: int) -> float:
    """Of a step, among ranks that see different samples, while those with other parts of the model do the same."""
    links = ExchangeModel(steps.exchange.inside, shared(steps.exchange.between, parts))
    gradients = dataclasses.replace(steps.gradients, bytes=round(num_bytes))
    return dataclasses.replace(steps, exchange=links, gradients=gradients).exchange_s(shape)
