"""``parallel.shard: parameters``: each rank has some rows of all parameters (FSDP2); layers are gathered to compute.
``zero2`` does the same with layers that stay whole until their backward pass.

FSDP2 gathers parameters and sums gradients. Optimizers, averages and checkpoints see plain tensors over the memory of
this rank's rows, so they need not know about DTensor.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Module, ModuleDict, ModuleList, Parameter, ParameterDict, ParameterList, Sequential
from torch.optim import Optimizer

from hpctrain.backends.torch.device import Compute
from hpctrain.backends.torch.process_groups import DefaultGroup
from hpctrain.backends.torch.reduce.reducer import Number, Reducer, fill_slots
from hpctrain.backends.torch.state.optimizer import OptimizerPart, Slots
from hpctrain.backends.torch.strategies.estimated import Estimated
from hpctrain.backends.torch.strategies.memory_estimate import MemoryEstimate
from hpctrain.backends.torch.strategies.parameter_traits import (
    OwnRows,
    ParameterTraits,
    plain,
    refuse_late,
    replace_parameters,
)
from hpctrain.backends.torch.strategies.partition import CUT, Partition, Slices, squares_of
from hpctrain.backends.torch.strategies.row_shares import RowRange, part_of_rows
from hpctrain.backends.torch.strategies.strategy import Opening, Prepared, Strategy, Updates, needs_norm
from hpctrain.backends.torch.task.checks import try_sharded
from hpctrain.backends.torch.task.shares import ONLY, Share
from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.config.combinations import refuse
from hpctrain.config.features import Feature, used
from hpctrain.config.sections import ReduceConfig
from hpctrain.errors import UserError
from hpctrain.reduce.candidates import Candidate
from hpctrain.reduce.flat_layout import SLOTS, SQUARE, ExchangeResult, read_slots

LISTS = (ModuleList, ModuleDict, ParameterList, ParameterDict)
"""Containers, which are not called themselves, unless a subclass defines forward."""
COMPARED_UPDATES = 8
"""Updates in which ranks compare the order of their layers: those that choose layers differently do so early."""
END = "the end of a forward pass"
"""What follows the last layer."""
SHARDED = (
    "With parallel.shard: parameters or gradients, layers are whole only in passes: call the model and its "
    "layers, not methods such as model.encode or layer.forward, and use no weight outside its layer; or set "
    "parallel.shard: optimizer"
)
"""Why reading weights outside forward fails."""
REDUCES_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether this PyTorch can sum gradients of parameters that some ranks have not used; without that, ranks that used
different parameters would sum gradients of different ones."""
WHAT = "add up what gradients leave whole"
"""Completes "waited for the other ranks to ..." in errors."""


@dataclass(frozen=True)
class Held:
    """A parameter, as this rank has it."""

    name: str
    module: Parameter
    """The model's parameter: a DTensor, or a plain one if it is a scalar."""
    own: Parameter
    """A plain parameter over the memory of this rank's rows."""
    rows: Slices | None
    """The place of these rows; None for a scalar, which each rank has."""


@dataclass(frozen=True)
class ShardGroups:
    """The data-parallel ranks, and those of them over which rows are divided."""

    data: Group
    """All of them."""
    rows: Group
    """Those that together have one copy of the model."""
    copy: int
    """Index of this rank's copy."""
    copies: int
    mesh: DeviceMesh
    """Over ``rows``; with several copies, over copies and rows."""

    def place(self, slices: Slices) -> Slices:
        """A place in whole parameters, of the ranks of this rank's copy, as one of all ranks."""
        copy = slices.copy * self.copies + self.copy
        return dataclasses.replace(slices, copy=copy, copies=slices.copies * self.copies)


def shard_groups(world: World, device: torch.device, by_node: bool) -> ShardGroups:
    """The groups of the data-parallel ranks, which are the world of ``torch.distributed``. Collective.

    Raises UserError, on all ranks, if nodes are to have copies of the model, and different numbers of ranks.
    """
    data = world.data
    assert dist.group.WORLD is not None, "it is open"
    nodes = world.nodes_of(data)
    copies = sorted(set(nodes))
    members = [[rank for rank, node in enumerate(nodes) if node == one] for one in copies]
    if not by_node or len(members) == 1:
        return ShardGroups(data, data, 0, 1, DeviceMesh.from_group(dist.group.WORLD, device.type))
    sizes = sorted({len(ranks) for ranks in members})
    if sizes[0] == 1 or len(sizes) > 1:
        raise UserError(
            f"parallel.shard_within is node, and nodes have {' or '.join(map(str, sizes))} of the ranks that see "
            "different samples",
            "start the same number of ranks, more than one, on each node; or leave parallel.shard_within out",
        )
    mesh = DeviceMesh(device.type, torch.tensor(members), mesh_dim_names=("copies", "rows"))
    rows = data.split_by("rows", lambda rank: copies.index(nodes[rank]))
    return ShardGroups(data, rows, copies.index(world.node), len(members), mesh)


class FullySharded(Partition):
    """The partition of a model whose parameters are sharded by rows.

    Args:
        modules: the modules that are gathered, the model first.
        before: the partition that tensor parallelism has left of it.
        groups: the ranks over which it is sharded.
        every: its parameters.
        order: compares the order of layers in the first updates.
        keeps: whether layers stay whole until their backward pass.
    """

    def __init__(
        self,
        modules: Sequence[FSDPModule],
        before: Partition,
        groups: ShardGroups,
        every: Sequence[Held],
        order: LayerOrder,
        keeps: bool = False,
    ) -> None:
        cut = frozenset(id(one.own) for one in every if one.name in before.slices)
        super().__init__(before.tp_group, before.slices, cut)
        self.update_among(groups.rows)
        self.groups, self.sync_group = groups, groups.data
        self.root, self.modules = modules[0], modules
        self.every = every
        self.order, self.keeps = order, keeps
        self.held = {one.name: one.own for one in every}
        self.places = {one.name: one.rows for one in every if one.rows is not None}

    @property
    def hint(self) -> str:
        """See Partition."""
        return f"{CUT}. {SHARDED}" if self.slices else SHARDED

    def try_loss(self, loss: Tensor) -> None:
        """See Partition."""
        try_sharded(loss)

    def swap(self, parameters: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """See Partition. Copies values, since FSDP2 keeps parameters in their memory."""
        with torch.no_grad():
            for parameter, other in zip(parameters, others, strict=True):
                before = parameter.clone()
                parameter.copy_(other)
                other.copy_(before)


def layers_of(model: Module) -> list[Module]:
    """The layers that are gathered and freed one after the other: the members of the model's lists and sequences, and
    attributes of one module that are blocks of one class.

    Layers without parameters, or that share one with others, are left out: their parameters are gathered with the rest
    of the model.
    """
    found = list(outermost(model))
    below = {id(module) for layer in found for module in layer.modules()}
    users = Counter(id(one) for layer in found for one in layer.parameters())
    for module in model.modules():
        users.update(id(one) for one in module._parameters.values() if id(module) not in below)
    owned = [(layer, [id(one) for one in layer.parameters()]) for layer in found]
    return [layer for layer, own in owned if own and all(users[one] == 1 for one in own)]


def outermost(module: Module) -> Iterator[Module]:
    """Outermost non-container modules in containers, or of a class that occurs several times, without such inside."""
    classes = Counter(type(child) for child in module.children() if any(child.children()))
    for child in module.children():
        is_block = classes[type(child)] > 1 and not any(outermost(child))
        if (is_container(module) or is_block) and not is_container(child):
            yield child
        else:
            yield from outermost(child)


def is_container(module: Module) -> bool:
    """Whether a module is only a container, not called itself."""
    return type(module) is Sequential or (isinstance(module, LISTS) and type(module).forward is Module.forward)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's rows of a DTensor, sharing its memory."""
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local


def shard_model(
    model: Module, before: Partition, groups: ShardGroups, compute: Compute, keeps: bool = False
) -> FullySharded:
    """Shards all parameters by rows, which makes them DTensors. Does not communicate.

    Args:
        model: on its device, equal on all ranks; may be split by tensor parallelism. Of parameters on the meta device,
            each rank gets memory for its rows only.
        before: the partition that tensor parallelism has left of it.
        groups: the ranks.
        compute: this rank's device and precision.
        keeps: whether layers stay whole from the forward to the backward pass.
    """
    low_precision, mesh = compute.low_precision, groups.mesh
    plain = dict(model.named_parameters())
    scalars = {parameter for parameter in plain.values() if not parameter.ndim}
    shapes = {name: tuple(parameter.shape) for name, parameter in plain.items()}
    for parameter in plain.values():
        parameter.data = parameter.data.contiguous()  # as FSDP2 requires
    layers = layers_of(model)
    for layer in (*layers, model):
        apart = with_statistics(layer, layers)
        if low_precision and apart and layer not in apart:
            fully_shard(apart, mesh=mesh, reshard_after_forward=not keeps, ignored_params=scalars)
        fully_shard(
            layer,
            mesh=mesh,
            reshard_after_forward=not keeps and layer is not model,  # which the backward pass begins with
            mp_policy=policy_of(layer, None if layer in apart else low_precision),
            ignored_params=scalars,
        )
    if compute.allocates and any(parameter.is_meta for parameter in model.parameters()):
        model._apply(lambda one: torch.zeros_like(one, device=compute.device) if one.is_meta else one)
    order = LayerOrder(layers, model, groups.data, waits=compute.device.type == "cpu")
    modules = sharded_modules(model)
    for module in modules:
        module.set_gradient_divide_factor(1.0)  # losses are scaled to the global batch
        module.set_force_sum_reduction_for_comms(True)
        module.set_reduce_scatter_unused_params(True)  # others may have used them
    every = []
    for name, parameter in model.named_parameters():
        own, rows = parameter, None
        if isinstance(parameter, DTensor):
            begin, end = part_of_rows(shapes[name][0], groups.rows.rank, groups.rows.size)
            rows = groups.place(before.rows(name, shapes[name], begin, end))
            own = Parameter(local_of(parameter), parameter.requires_grad)
            own.__dict__.update(vars(plain[name]))
            assert len(own) == end - begin, "as FSDP2 distributes rows"
        every.append(Held(name, parameter, own, rows))
    model.register_forward_hook(functools.partial(free, modules))
    return FullySharded(modules, before, groups, every, order, keeps)


def require_torch() -> None:
    """Raises UserError if this PyTorch is too old."""
    if not REDUCES_UNUSED:
        raise UserError(
            f"parallel.shard: parameters and gradients need PyTorch 2.13 or newer, and this is {torch.__version__}",
            "pip install 'torch>=2.13'; or set parallel.shard to optimizer",
        )


def policy_of(layer: Module, low_precision: torch.dtype | None) -> MixedPrecisionPolicy:
    """Gathers parameters of 32 bits in the precision of forward passes, and sums gradients in 32 bits.

    Inputs stay as they are: autocast casts those of the operations that it knows, and leaves coordinates, for instance,
    in 32 bits. It casts no parameter, so it keeps no copy of one.
    """
    types = {one.dtype for one in layer.parameters()}
    low = low_precision if torch.float32 in types and torch.float64 not in types else None
    has_halves = low or any(one.is_floating_point and one.itemsize == 2 for one in types)
    return MixedPrecisionPolicy(low, torch.float32 if has_halves else None, cast_forward_inputs=False)


def with_statistics(layer: Module, layers: Sequence[Module]) -> list[Module]:
    """Modules outside other layers that have parameters and floating-point buffers, such as BatchNorm, which compute
    with both in one dtype: their parameters are not gathered in 16 bits."""
    others = {id(module) for each in layers if each is not layer for module in each.modules()}
    return [
        module
        for module in layer.modules()
        if id(module) not in others and any(one is not None for one in module._parameters.values())
        if any(one is not None and one.is_floating_point() for one in module._buffers.values())
    ]


def sharded_modules(model: Module) -> list[FSDPModule]:
    """The modules whose parameters are gathered together."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def complete_sums(modules: Sequence[FSDPModule]) -> None:
    """Before an update's last backward pass, gives zeros to parameters that no earlier one has used: FSDP2 has added up
    gradients in 32 bits, and takes none of 16 bits with them."""
    for group in (group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups):
        sums = [one.unsharded_accumulated_grad for one in group.fsdp_params]
        known = next((one for one in sums if one is not None), None)
        for one, added in zip(group.fsdp_params, sums, strict=True):
            if known is not None and added is None and one.sharded_param.requires_grad:
                one.unsharded_accumulated_grad = known.new_zeros(one.sharded_param.shape)


def free(modules: Sequence[FSDPModule], *ignored: Any) -> None:
    """After a forward pass that no backward pass follows, frees what is gathered: parameters may change."""
    if not torch.is_grad_enabled():
        for module in modules:
            module.reshard()


class LayerOrder:
    """Makes forward passes raise UserError, on all ranks, if they do not compute the same layers in the same order:
    ranks would take rows of different layers for one.

    On GPUs, where the host does not wait for a gather, ranks compare at the end of a pass. On CPUs, where a rank would
    wait for a gather that another one never begins, before each gather.

    Args:
        layers: the layers that are gathered, one after the other.
        model: the model that they are part of.
        group: the ranks.
        waits: whether gathering waits for other ranks.
    """

    def __init__(self, layers: Sequence[Module], model: Module, group: Group, waits: bool) -> None:
        self.group, self.waits = group, waits
        name_of = {id(module): name for name, module in model.named_modules()}
        self.names = ["the model", *(name_of[id(layer)] for layer in layers), END]
        self.reached: list[int] = []
        """Places that this pass has reached, as indices of ``names``."""
        self.hooks = [
            one.register_forward_pre_hook(functools.partial(self.reach, place), prepend=True)
            for place, one in enumerate((model, *layers))
        ]
        self.hooks.append(model.register_forward_hook(functools.partial(self.reach, len(self.names) - 1)))

    def reach(self, place: int, *ignored: Any) -> None:
        """Records a place, and compares it with the other ranks' if they can be waited for."""
        if not place:
            self.reached.clear()
        self.reached.append(place)
        if not self.waits and self.names[place] != END:
            return
        if self.group.same(zlib.crc32(np.array(self.reached).tobytes()), "compute the same layers"):
            return
        passes = self.group.allgather(self.reached, "say which layers they have computed")
        depth = next(depth for depth, places in enumerate(zip(*passes, strict=False)) if len(set(places)) > 1)
        first, *others = [self.names[reached[depth]] for reached in passes]
        raise UserError(
            f"the ranks' forward passes differ while parallel.shard gathers layers: one has reached {first}, another "
            f"{next(one for one in others if one != first)}",
            "choose layers by values that are equal on all ranks, not by a rank's own samples or random numbers; "
            "or set parallel.shard: optimizer",
        )

    def close(self) -> None:
        """Ends the comparison."""
        while self.hooks:
            self.hooks.pop().remove()


class FullyShardedReducer(Reducer):
    """See reduce.reducer.Reducer. FSDP2 has already summed gradients at the end of the last backward pass.

    Args:
        name: name of the candidate.
        tensor: the model's partition.
        optimizers: optimizers of its parameters.
        ranks: the process group of ``torch.distributed``; closed with the reducer.
        needs_norm: whether each update needs the gradient norm, which is then summed together with the loss.
    """

    def __init__(
        self,
        name: str,
        tensor: FullySharded,
        optimizers: Sequence[Optimizer],
        ranks: DefaultGroup,
        needs_norm: bool = False,
    ) -> None:
        self.name = name
        self.tensor = tensor
        self.optimizers = optimizers
        self.ranks, self.needs_norm = ranks, needs_norm
        self.square = 0.0
        self.updates = 0
        self.every = [one for one in tensor.every if one.own.requires_grad]
        self.known = {id(one.own) for one in tensor.every}
        self.memory = [(one, one.module.untyped_storage()) for one in tensor.every]

    def begin_pass(self, is_last: bool) -> None:
        root, keeps = self.tensor.root, self.tensor.keeps
        if is_last and not keeps:
            complete_sums(self.tensor.modules)
        root.set_is_last_backward(is_last or keeps)
        root.set_requires_gradient_sync(is_last or keeps)

    def begin(self) -> None:
        self._require_memory()
        self.updates += 1
        if self.updates > COMPARED_UPDATES:
            self.tensor.order.close()
        for module in self.tensor.modules:
            module.reshard()  # a pass without a backward pass has gathered weights that may have changed since
        for one in self.every:
            one.module.grad = one.own.grad = None

    def exchange(self, loss: Number = 0.0, weight: Number | None = None) -> ExchangeResult:
        refuse_late(self.optimizers, lambda one: id(one) not in self.known, {})
        for one in self.every:
            gradient = one.module.grad
            if gradient is None:
                one.own.grad = torch.zeros_like(one.own) if one.module.requires_grad else None
            elif one.rows is not None:
                one.own.grad = local_of(gradient)
        self._add_scalars()
        slots = torch.zeros(SLOTS, dtype=torch.float64, device=self.every[0].own.device)
        fill_slots(slots, loss, weight)
        if self.needs_norm:
            slots[SQUARE] = squares_of([one.grad for _, one in self.summed() if one.grad is not None]).sum()
        sums = slots.cpu().numpy()
        self.tensor.groups.data.add(sums, "add up their losses")
        self.square = float(sums[SQUARE]) / self.tensor.groups.copies
        return read_slots(sums.tolist())

    def gradients(self) -> list[Tensor]:
        return [one.own.grad for one in self.every if one.own.grad is not None]

    def summed(self) -> list[tuple[str, Tensor]]:
        """See Reducer; scalars, which all ranks have, count on the first rank of each copy only."""
        every = [one for one in self.every if one.rows is not None or self.tensor.updaters.rank == 0]
        return [(one.name, one.own) for one in every]

    def norm(self) -> float:
        return math.sqrt(self.square)

    def close(self) -> None:
        self.ranks.close()

    def _add_scalars(self) -> None:
        """Sums the gradients of scalars, which FSDP2 ignores."""
        have = [one.own.grad for one in self.every if one.rows is None and one.own.grad is not None]
        if have:
            sums = torch.stack([one.double() for one in have]).cpu().numpy()
            self.tensor.groups.data.add(sums, WHAT)
            torch._foreach_copy_(have, list(torch.from_numpy(sums).to(have[0].device)))

    def _require_memory(self) -> None:
        """Raises UserError if a parameter was moved to other memory, which DTensors do not notice."""
        for one, before in self.memory:
            if one.module.untyped_storage()._cdata != before._cdata:
                raise UserError(
                    f"the task has given {one.name} other memory (.data = ...), which has no effect where "
                    "parallel.shard gathers layers",
                    "change it in place, under torch.no_grad(), as clamp_ and copy_ do; or set "
                    "parallel.shard: optimizer",
                )


@dataclass(frozen=True)
class FullyShardedReducers:
    """The only reducer of a sharded model; see reducer_choice.Reducers."""

    tensor: FullySharded
    optimizers: Sequence[Optimizer]
    ranks: DefaultGroup
    needs_norm: bool
    """Whether each update needs the gradient norm."""
    sparse: Sequence[Parameter] = ()
    """Always empty: no gradient stays sparse."""

    def possible(self, config: ReduceConfig, world: World) -> list[Candidate]:
        return [Candidate("nccl" if self.ranks.word == "nccl" else "gloo", "sharded")]

    def open(self, candidate: Candidate, group: Group) -> FullyShardedReducer:
        return FullyShardedReducer(candidate.name, self.tensor, self.optimizers, self.ranks, self.needs_norm)


def own_rows_of(every: Sequence[Held], plain: Sequence[Tensor]) -> dict[int, OwnRows | None]:
    """This rank's rows of each parameter that is not a scalar, by the whole parameter's id; None if it has no rows.

    Args:
        every: parameters as this rank has them.
        plain: the whole parameters, in the same order.
    """
    found: dict[int, OwnRows | None] = {}
    for index, (one, whole) in enumerate(zip(every, plain, strict=True)):
        if one.rows is not None and one.rows.rows is not None:
            begin, end = one.rows.rows.start, one.rows.rows.stop
            found[id(whole)] = OwnRows(RowRange(index, 0, begin, end, len(whole)), one.own) if begin < end else None
    return found


def planned(opening: Opening) -> Strategy | None:
    """The strategy, if the run shards parameters. Raises UserError if an optimizer cannot be sharded."""
    if not opening.divides(Feature.SHARD_PARAMETERS):
        return None
    return functools.partial(shard, opening, opening.traits, False)


def shard(opening: Opening, traits: ParameterTraits, keeps: bool, prepared: Prepared) -> Prepared:
    """Leaves this rank its rows of each parameter. Collective.

    Args:
        opening: the run.
        traits: traits of the parameters.
        keeps: see ``shard_model``.
        prepared: the part of the model that this rank has.

    Raises:
        UserError: this PyTorch is too old, or optimizers or nodes cannot be divided.
    """
    require_torch()
    model, world = opening.model, opening.world
    names = opening.names()
    found = uncuttable(opening.shares(), opening.parts, traits)
    refuse({**opening.features, **used({Feature.WHOLE_TENSORS: found})})
    whole = list(model.parameters())
    group = DefaultGroup(world.data, opening.compute.device)
    groups = shard_groups(world, opening.compute.device, opening.config.parallel.shard_within == "node")
    partition = shard_model(model, prepared.partition, groups, opening.compute, keeps)
    every = partition.every
    mine = own_rows_of(every, whole)
    for optimizer in opening.optimizers:
        for settings in optimizer.param_groups:
            replace_parameters(optimizer, settings, mine)
    updates = Updates(
        {ONLY: Share([(one.name, one.own) for one in every if one.own.requires_grad])},
        {**names, **{id(one.own): one.name for one in every}},
        Slots({id(one.own): one.rows for one in every if one.rows}),
        {ONLY: FullyShardedReducers(partition, opening.optimizers, group, needs_norm(opening, partition))},
    )
    return dataclasses.replace(prepared, partition=partition, updates=updates)


def uncuttable(shares: Mapping[str, Share], parts: Sequence[OptimizerPart], traits: ParameterTraits) -> str | None:
    """Names the first parameter that cannot be split by rows, and its optimizer; None if all can be."""
    names = {id(parameter): name for share in shares.values() for name, parameter in share.pairs}
    for optimizer in plain(parts):
        for one in (one for settings in optimizer.param_groups for one in settings["params"]):
            if id(one) in names and not one.numel():
                return f"{names[id(one)]} has no elements"
            if id(one) in names and one.ndim and len(one) > 1 and id(one) not in traits.elementwise:
                return f"{type(optimizer).__name__} does not update the rows of {names[id(one)]} by themselves"
    return None


def estimate(model: Estimated) -> MemoryEstimate:
    """See estimated.Estimate."""
    return estimate_rows(model, keeps=False)


def estimate_rows(model: Estimated, keeps: bool) -> MemoryEstimate:
    """The estimate for a model whose parameters are sharded; ``keeps`` as for ``shard_model``."""
    parts = model.framework.source.optimizer_state.every
    whole_tensors = uncuttable(model.shares, parts, model.traits)
    model.refuse({Feature.WHOLE_TENSORS: whole_tensors})
    every = list(model.framework.model.parameters())
    total = sum(one.nbytes for one in every)
    held = sum(
        part_of_rows(len(one), 0, model.rows)[1] / len(one) * one.nbytes if one.ndim else one.nbytes for one in every
    )
    gathered, unsummed = at_a_time(model.framework.model, model.framework.parts.compute, model.micro_batches, keeps)
    return in_rows(model.whole, held / max(total, 1), gathered, unsummed)


def at_a_time(model: Module, compute: Compute, micro_batches: int, keeps: bool) -> tuple[int, int]:
    """Bytes of parameters, and of gradients, that a rank has whole at a time; arguments as for ``in_rows``."""
    total = sum(one.nbytes for one in model.parameters())
    layers = sorted(sum(one.nbytes for one in layer.parameters()) for layer in layers_of(model))
    narrow = 1 if compute.low_precision is None else 2
    few = (total - sum(layers[:-2])) // narrow
    trained = sum(one.numel() * max(one.itemsize, 4) for one in model.parameters() if one.requires_grad)
    return total // narrow if keeps else few, trained if micro_batches > 1 and not keeps else few


def in_rows(whole: MemoryEstimate, share: float, gathered: int, unsummed: int) -> MemoryEstimate:
    """The estimate for a model whose parameters are sharded.

    Args:
        whole: estimate without sharding.
        share: largest fraction of the state that a rank has.
        gathered: bytes of parameters that are gathered at a time: those outside layers, of one layer, and of the next.
        unsummed: bytes of whole gradients: of as many layers, or of all until an update's last micro-batch.
    """
    rows = whole.scaled(parameters=share, gradients=share, optimizer=share, averages=share)
    parameters, gradients = rows.parameters + gathered, rows.gradients + unsummed
    return dataclasses.replace(rows, parameters=parameters, gradients=gradients, copies=0)
