"""Gives each rank's optimizers, or all of the model, the rows of parameters that the rank updates, in place of whole
parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.frameworks.torch.holdings import Holdings
from hpctrain.frameworks.torch.loose import is_array
from hpctrain.frameworks.torch.optimizer import Part, Slots, Together
from hpctrain.frameworks.torch.shares import ONLY, Share
from hpctrain.frameworks.torch.state import load_random, random_tensors
from hpctrain.parallel.torch_fully_sharded import FullySharded, own_rows_of, shard_model
from hpctrain.parallel.torch_group import DefaultGroup
from hpctrain.parallel.torch_probe import Verdict, is_whole, try_optimizer
from hpctrain.parallel.torch_sharded import OwnRows, Sharded, rows_of, shard
from hpctrain.parallel.torch_tensor import Slices, TensorParallel
from hpctrain.parallel.trial import small


@dataclass(frozen=True)
class Judgement:
    """How the parameters of all optimizers may be shared out."""

    verdicts: Mapping[int, Verdict] = field(default_factory=dict)
    """By the id of each parameter that is updated."""
    coupled: str | None = None
    """An optimizer whose update of a parameter depends on others."""

    @property
    def common(self) -> frozenset[str]:
        """Slots that are not cut with the rows."""
        return frozenset[str]().union(*(verdict.common for verdict in self.verdicts.values()))

    def cuttable(self, shares: Mapping[str, Share], groups: Sequence[Group], nearly: bool = False) -> set[int]:
        """Ids of parameters that may be cut between rows, as all ranks of the groups found. Collective.

        Args:
            shares: parameters by optimizer.
            groups: one after the other.
            nearly: whether to rounding is enough; else to the bit.
        """
        wanting = [id(parameter) for share in shares.values() for _, parameter in share.pairs]
        verdicts = [self.verdicts.get(one, Verdict(is_alone=True)) for one in wanting]
        found = [one.nearly_by_rows if nearly else one.by_rows for one in verdicts]
        for group in groups:
            everywhere = group.allgather(found, "compare how optimizer state may be cut")
            found = [all(told) for told in zip(*everywhere, strict=True)]
        return {one for one, may_be in zip(wanting, found, strict=True) if may_be}


@dataclass(frozen=True)
class Sharding:
    """Optimizers whose parameters are shared out."""

    of: Mapping[str, Sharded]
    """By optimizer."""
    names: Mapping[int, str]
    """Of this rank's parts of parameters, by id: those of the whole ones."""
    slots: Slots


def plain(parts: Sequence[Part]) -> list[Optimizer]:
    """Those that update something themselves."""
    return [part.optimizer for part in parts if type(part.optimizer) is not Together]


def unsuited(parts: Sequence[Part], holdings: Holdings) -> str | None:
    """What kind of optimizer of the task's holds others, or state elsewhere than in ``state`` and ``param_groups``."""
    for part in parts:
        inner = [other for other in parts if other is not part and other.path.startswith(part.prefix)]
        if part.speaks or (inner and type(part.optimizer) is not Together):
            return type(part.optimizer).__name__
    found = holdings.find(holdings.roots[0])
    if found.modules or found.speakers or any(map(is_array, found.loose.values())):
        return type(parts[-1].optimizer).__name__
    return None


def judge(parts: Sequence[Part], device: torch.device) -> Judgement:
    """Tries all optimizers, each on a small tensor of each kind that it has. Random states stay as they were.

    Raises UserError if one cannot be tried.
    """
    random = {tensor.name: np.array(tensor.array) for tensor in random_tensors(device)}
    verdicts: dict[int, Verdict] = {}
    coupled = None
    try:
        for optimizer in plain(parts):
            for group in optimizer.param_groups:
                known: dict[object, Verdict] = {}
                for parameter in (one for one in group["params"] if one.requires_grad):
                    kind = small(tuple(parameter.shape)), parameter.dtype
                    if kind not in known:
                        known[kind] = try_optimizer(optimizer, group, parameter)
                    verdicts[id(parameter)] = known[kind]
                    coupled = coupled if known[kind].is_alone else type(optimizer).__name__
    finally:
        load_random(device, random)
    return Judgement(verdicts, coupled)


def largest_share(shares: Mapping[str, Share], judgement: Judgement, ranks: Group) -> float:
    """How much of the bytes that are updated the rank with most would update; 1 is all. Talks to no other rank."""
    held = [0.0] * ranks.size
    by_rows = {one for one, verdict in judgement.verdicts.items() if verdict.by_rows}
    for share in shares.values():
        for piece in shard(share.pairs, by_rows, set(judgement.verdicts), ranks).shares.pieces:
            parameter = share.pairs[piece.parameter][1]
            if id(parameter) in judgement.verdicts:
                held[piece.owner] += (piece.end - piece.begin) / piece.rows * parameter.nbytes
    return max(held) / max(sum(held), 1)


def share_out_optimizers(
    shares: Mapping[str, Share],
    parts: Sequence[Part],
    judgement: Judgement,
    world: World,
    names: Mapping[int, str],
    tensor: TensorParallel,
) -> Sharding:
    """Shares out the parameters of all optimizers, which then hold this rank's parts alone. Collective.

    Args:
        shares: parameters by optimizer, on their device.
        parts: all optimizers.
        judgement: of them.
        world: the ranks; those that have the same parts of the model share out its parameters.
        names: of parameters, by id.
        tensor: what this rank has of them.
    """
    cuttable = judgement.cuttable(shares, (world.tensor, world.data))  # other stages have other parameters
    of = {name: shard(share.pairs, cuttable, set(judgement.verdicts), world.data) for name, share in shares.items()}
    mine: dict[int, OwnRows | None] = {id(parameter): None for each in of.values() for _, parameter in each.pairs}
    slices: dict[int, Slices] = {}
    own_names: dict[int, str] = {}
    for sharded in of.values():
        for rows in sharded.parts:
            whole = sharded.pairs[rows.piece.parameter][1]
            mine[id(whole)] = rows
            name, is_all = names[id(whole)], rows.piece.rows == 1
            ends = (0, len(whole) if whole.ndim else 1) if is_all else (rows.piece.begin, rows.piece.end)
            slices[id(rows.parameter)] = tensor.rows(name, tuple(whole.shape), *ends)
            own_names[id(rows.parameter)] = name
    for optimizer in plain(parts):
        for settings in optimizer.param_groups:
            replace_parameters(optimizer, settings, mine, judgement.common)
    return Sharding(of, own_names, Slots(slices, judgement.common))


def uncuttable(shares: Mapping[str, Share], parts: Sequence[Part], judgement: Judgement, world: World) -> str | None:
    """Of what optimizer some parameter may not be cut between rows, and which, if all have to be. Collective."""
    cuttable = judgement.cuttable(shares, [world.everyone], nearly=True)
    names = {id(parameter): name for share in shares.values() for name, parameter in share.pairs}
    for optimizer in plain(parts):
        for one in (one for settings in optimizer.param_groups for one in settings["params"]):
            if id(one) in names and one.ndim and len(one) > 1 and id(one) not in cuttable:
                return f"{type(optimizer).__name__} does not update the rows of {names[id(one)]} by themselves"
    return None


@dataclass(frozen=True)
class Divided:
    """A model of which each rank has rows, and what goes with it."""

    tensor: FullySharded
    shares: dict[str, Share]
    """This rank's rows by optimizer."""
    names: Mapping[int, str]
    """Of this rank's rows, by id."""
    slots: Slots
    group: DefaultGroup


def shard_parameters(
    model: Module, before: TensorParallel, world: World, parts: Sequence[Part], judgement: Judgement
) -> Divided:
    """Leaves each rank its rows of all parameters; the optimizers then have these. Collective.

    Args:
        model: on its device, equal on all ranks, with one optimizer or a list of them.
        before: what its tensor group has left of it.
        world: the ranks.
        parts: all optimizers.
        judgement: of them; they may be cut between rows.
    """
    whole = list(model.parameters())
    group = DefaultGroup(world.data, whole[0].device)
    tensor = shard_model(model, before, world)
    mine = own_rows_of(tensor.every, whole)
    for optimizer in plain(parts):
        for settings in optimizer.param_groups:
            replace_parameters(optimizer, settings, mine, judgement.common)
    return Divided(
        tensor,
        {ONLY: Share([(one.name, one.own) for one in tensor.every if one.own.requires_grad])},
        {id(one.own): one.name for one in tensor.every},
        Slots({id(one.own): one.rows for one in tensor.every if one.rows}, judgement.common),
        group,
    )


def replace_parameters(
    optimizer: Optimizer, group: dict[str, object], mine: Mapping[int, OwnRows | None], common: frozenset[str]
) -> None:
    """Puts this rank's rows in the place of whole parameters, with the state that they have from the start."""
    wholes = group["params"]
    assert isinstance(wholes, list), "of an optimizer"
    kept: list[tuple[int, Tensor]] = []
    for index, whole in enumerate(wholes):
        rows = mine.get(id(whole))
        if id(whole) not in mine:  # it wants no gradient
            kept.append((index, whole))
            continue
        slots = optimizer.state.pop(whole, None)
        if rows is not None:
            kept.append((index, rows.parameter))
            if slots:
                optimizer.state[rows.parameter] = {
                    name: own_rows(slot, whole, rows) if name not in common else slot for name, slot in slots.items()
                }
    if isinstance(labels := group.get("param_names"), list):
        group["param_names"] = [labels[index] for index, _ in kept]
    group["params"] = [parameter for _, parameter in kept]


def own_rows(slot: object, whole: Parameter, rows: OwnRows) -> object:
    """Of a slot that has the shape of the parameter."""
    if isinstance(slot, Tensor) and is_whole(slot, tuple(whole.shape)):
        return rows_of(slot, rows.piece).clone(memory_format=torch.preserve_format)
    return slot
