"""Shards a model by FSDP2, which gathers parameters and sums gradients.

Optimizers, averages and checkpoints see plain tensors over the memory of this rank's rows, so they need not know about
DTensor.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from hpctrain.backends.torch.device import Compute
from hpctrain.backends.torch.strategies.fsdp.complete_sums import sum_unused
from hpctrain.backends.torch.strategies.fsdp.layer_order import LayerOrder
from hpctrain.backends.torch.strategies.fsdp.layers import layers_of
from hpctrain.backends.torch.strategies.partition import CUT, Partition, Slices
from hpctrain.backends.torch.strategies.row_shares import part_of_rows
from hpctrain.backends.torch.task.checks import try_sharded
from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.config.sections import ParallelConfig
from hpctrain.errors import UserError

SHARDED = (
    "With parallel.shard: parameters or gradients, layers are whole only in passes: call the model and its "
    "layers, not methods such as model.encode or layer.forward, and use no weight outside its layer; or set "
    "parallel.shard: optimizer"
)
"""Why reading weights outside forward fails."""


@dataclass(frozen=True)
class LocalParameter:
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
    mesh = DeviceMesh(device.type, torch.tensor(members, device="cpu"), mesh_dim_names=("copies", "rows"))
    rows = data.split_by("rows", lambda rank: copies.index(nodes[rank]))
    return ShardGroups(data, rows, copies.index(world.node), len(members), mesh)


class FullySharded(Partition):
    """The partition of a model whose parameters are sharded by rows.

    Args:
        before: the partition that tensor parallelism has left of it.
        groups: the ranks over which it is sharded.
        modules: the modules that are gathered, the model first.
        every: its parameters.
        layers: its layers.
        order: compares the order of layers in the first updates.
        keeps: whether layers stay whole until their backward pass.
    """

    def __init__(
        self,
        before: Partition,
        groups: ShardGroups,
        modules: Sequence[FSDPModule],
        every: Sequence[LocalParameter],
        layers: Sequence[Module],
        order: LayerOrder,
        keeps: bool,
    ) -> None:
        cut = frozenset(id(one.own) for one in every if one.name in before.slices)
        super().__init__(before.tp_group, before.slices, cut)
        self.update_among(groups.rows)
        self.groups, self.sync_group = groups, groups.data
        self.modules, self.every, self.layers = modules, every, layers
        self.order, self.keeps = order, keeps
        self.held = {one.name: one.own for one in every}
        self.places = {one.name: one.rows for one in every if one.rows is not None}

    @property
    def hint(self) -> str:
        """See Partition."""
        return f"{CUT}. {SHARDED}" if self.slices else SHARDED

    def free(self) -> None:
        """See Partition."""
        for module in self.modules:
            module.reshard()

    def leave_out(self, modules: Container[object]) -> None:
        """See Partition. If each pass sums gradients, those of other layers would be zeros; and if layers stay whole
        until their own backward pass, another one must not free them."""
        for module in self.modules if self.keeps else ():
            if module in modules:
                module.set_requires_gradient_sync(False, recurse=False)
                module.set_reshard_after_backward(False, recurse=False)

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


def shard_model(
    model: Module,
    before: Partition,
    groups: ShardGroups,
    compute: Compute,
    config: ParallelConfig,
    root: Module | None = None,
) -> FullySharded:
    """Shards all parameters by rows, which makes them DTensors. Does not communicate.

    Args:
        model: on its device, equal on all ranks; may be split by tensor parallelism. Of parameters on the meta device,
            each rank gets memory for its rows only.
        before: the partition that tensor parallelism has left of it.
        groups: the ranks.
        compute: this rank's device and precision.
        config: which layers are gathered, whether they stay whole until the backward pass, and where rows are.
        root: the module that passes call, which has all layers, if it is not the model.
    """
    compute = gathering(model, compute)
    keeps, device = config.shard == "gradients", compute.device
    host = torch.device("cpu") if config.offload else device
    before_sharding = dict(model.named_parameters())
    for parameter in before_sharding.values():
        parameter.data = parameter.data.contiguous()  # as FSDP2 requires
    layers = layers_of(model, config.layers)
    settings: dict[str, Any] = {
        "mesh": groups.mesh,
        "ignored_params": {parameter for parameter in before_sharding.values() if not parameter.ndim},
        "offload_policy": CPUOffloadPolicy(device.type != "cpu") if config.offload else OffloadPolicy(),
    }
    root = root or model
    for layer in (*layers, root):
        apart = with_statistics(layer, layers)
        if compute.low_precision and apart and layer not in apart:
            fully_shard(apart, reshard_after_forward=not keeps, **settings)
        fully_shard(
            layer,
            reshard_after_forward=not keeps and layer is not root,  # which the backward pass begins with
            mp_policy=policy_of(layer, None if layer in apart else compute.low_precision),
            **settings,
        )
    if compute.allocates and any(parameter.is_meta for parameter in model.parameters()):
        # Of the root, so that FSDP2 notices that its own parameters have other memory, too.
        root._apply(lambda one: torch.zeros_like(one, device=host if one.ndim else device) if one.is_meta else one)
    modules = [module for module in root.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_gradient_divide_factor(1.0)  # losses are scaled to the global batch
        module.set_force_sum_reduction_for_comms(True)
        sum_unused(module)
    every = [
        local_parameter(name, one, before_sharding[name], before, groups) for name, one in model.named_parameters()
    ]
    order = LayerOrder(layers, root, groups.data, waits=device.type == "cpu")
    root.register_forward_hook(functools.partial(free, modules))
    return FullySharded(before, groups, modules, every, layers, order, keeps)


def gathering(model: Module, compute: Compute) -> Compute:
    """How parameters are gathered: not in 16 bits if the model casts them itself."""
    return dataclasses.replace(compute, low_precision=None) if getattr(model, "casts_weights", False) else compute


def local_parameter(
    name: str, parameter: Parameter, whole: Parameter, before: Partition, groups: ShardGroups
) -> LocalParameter:
    """What this rank has of a parameter that was ``whole`` before it was sharded."""
    if not isinstance(parameter, DTensor):
        return LocalParameter(name, parameter, parameter, None)
    begin, end = part_of_rows(len(whole), groups.rows.rank, groups.rows.size)
    own = Parameter(local_of(parameter), parameter.requires_grad)
    own.__dict__.update(vars(whole))
    assert len(own) == end - begin, "as FSDP2 distributes rows"
    return LocalParameter(name, parameter, own, groups.place(before.rows(name, tuple(whole.shape), begin, end)))


def local_of(tensor: Tensor) -> Tensor:
    """This rank's rows of a DTensor, sharing its memory."""
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local


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

    def has_both(module: Module) -> bool:
        has_parameters = any(True for _ in module.parameters(recurse=False))
        return has_parameters and any(one.is_floating_point() for one in module.buffers(recurse=False))

    return [module for module in layer.modules() if id(module) not in others and has_both(module)]


def free(modules: Sequence[FSDPModule], *ignored: Any) -> None:
    """After a forward pass that no backward pass follows, frees what is gathered: parameters may change."""
    if not torch.is_grad_enabled():
        for module in modules:
            module.reshard()
