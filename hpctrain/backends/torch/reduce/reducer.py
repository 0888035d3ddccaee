"""Averages the gradients of a torch model over ranks."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch.nn import Module, Parameter

from hpctrain.backends.torch.process_groups import ProcessGroup, each_has_a_gpu, peers_of, word_of
from hpctrain.backends.torch.reduce import allreduce, messages
from hpctrain.backends.torch.reduce.gradients import FlatGradients, Sparse, SparseGradients, as_real, densify
from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.config.sections import ReduceConfig
from hpctrain.errors import UserError
from hpctrain.reduce import horovod_setup
from hpctrain.reduce.candidates import Candidate, candidates, look_around
from hpctrain.reduce.flat_layout import (
    BUCKET_BYTES,
    END_BYTES,
    GPU_BUCKET_BYTES,
    LOSS,
    SLOTS,
    WEIGHT,
    WEIGHTED,
    ExchangeResult,
    plan,
    read_slots,
)
from hpctrain.reduce.int8_sum import Residue, residue_of
from hpctrain.reduce.reducer_choice import Choice, ReducerChoice
from hpctrain.reduce.ring_allreduce import PIECE_BYTES
from hpctrain.train.clock import Phase, StepClock

Number: TypeAlias = float | torch.Tensor
"""A float, or a scalar tensor on any device."""


class Parameters(Protocol):
    """A module, or some of its parameters."""

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Names and parameters, in a fixed order."""


class SummedGradients(Protocol):
    """What an exchange leaves behind for the optimizer."""

    def gradients(self) -> list[torch.Tensor]:
        """Tensors with the summed gradients that this rank's optimizer uses, to be scaled in place."""

    def norm(self) -> float:
        """L2 norm of all summed gradients."""

    def summed(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Parameters by name, or this rank's parts of them, with summed gradients in ``grad``. Used for norms: if each
        element counts once over the ranks, parameters that all ranks update count on one rank only."""

    def forget_norm(self) -> None:
        """Called when summed gradients have been changed: a norm that was read before is wrong."""
        return

    def spread(self) -> bool:
        """After the optimizer's step, sends updated parameters to all ranks. Returns whether it waited for others."""


class Reducer(SummedGradients, Protocol):
    """Sums gradients over ranks, so that they become those of the global batch.

    Each update calls ``begin``, backward (if several times, with ``last_backward`` False before all but the last), and
    ``exchange``. Losses must be scaled before backward as ExchangeResult describes; afterwards, ``grad`` of each
    parameter is the sum. Unless a reducer overrides the methods for that, no gradient arrives early.
    """

    name: str
    """Name of the candidate, such as mpi-node."""
    last_backward: bool = True
    """Whether the next backward completes the gradients, so that they may be sent while it runs."""
    residue: Residue | None = None
    """Rounding error of int8 sums."""

    def begin(self) -> None:
        """Drops all gradients."""

    def let_arrive_early(self, allowed: bool) -> None:
        """Lets gradients arrive after ``exchange``, if possible, from the next update on; the same on all ranks."""
        return

    def begin_pass(self, is_last: bool) -> None:
        """Sets ``last_backward``, before each forward and each backward pass. Collective if each pass is summed."""
        self.last_backward = is_last

    def before_backward(self, totals: Callable[[], tuple[Number, Number | None]]) -> None:
        """Called before each backward pass of an update; ``totals`` returns what ``exchange`` would get after it."""
        return

    def exchange(self, loss: Number = 0.0, weight: Number | None = None) -> ExchangeResult:
        """Sums gradients over the ranks; returns the loss and divisor sent with them. Collective.

        Args:
            loss: this rank's part of the mean loss; or its loss sum over ``global_samples`` if a weight is given.
            weight: this rank's weight, over ``global_samples``, of a (sum, weight) loss.
        """

    def parts(self, clock: StepClock) -> Iterator[list[torch.Tensor]]:
        """Yields ``gradients``, at once or as they arrive; then only those parameters have ``grad`` set.

        The clock is marked after each wait.
        """
        yield self.gradients()

    def spread(self) -> bool:
        return False

    def close(self) -> None:
        """Stops taking gradients, ends threads and frees memory."""


class WithNorm(Reducer):
    """A reducer that reads the norm, if each update needs it, together with the loss: a GPU is then waited for once."""

    needs_norm: bool
    known_norm: float | None = None
    """The norm of this update's gradients, if ``exchange`` has read it."""

    def norm(self) -> float:
        """See SummedGradients."""
        return float(norm_of(self.gradients())) if self.known_norm is None else self.known_norm

    def forget_norm(self) -> None:
        """Gradients have changed since ``exchange``."""
        self.known_norm = None


class NoReducer(WithNorm):
    """For one rank: gradients stay where autograd puts them."""

    name = "none"

    def __init__(
        self,
        parameters: Sequence[tuple[str, Parameter]],
        tables: SparseGradients | None = None,
        sparse: Sparse = "auto",
        needs_norm: bool = False,
    ) -> None:
        self.needs_norm = needs_norm
        self.named = parameters
        self.parameters = [parameter for _, parameter in parameters]
        self.tables = tables or SparseGradients(())
        self.sparse = sparse

    def begin(self) -> None:
        self.known_norm = None
        for parameter in self.parameters:
            parameter.grad = None
        self.tables.begin()

    def exchange(self, loss: Number = 0.0, weight: Number | None = None) -> ExchangeResult:
        for name, parameter in self.named:
            if parameter.grad is None:  # as with several ranks, which cannot tell if it is unused on all of them
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            elif parameter.grad.is_sparse:
                parameter.grad = densify(name, parameter.grad, self.sparse)
        self.tables.exchange()
        numbers: list[Number] = [0.0] * SLOTS
        fill_slots(numbers, loss, weight)
        if self.needs_norm:
            numbers.append(norm_of(self.gradients()))
        self.known_norm, slots = taken_apart(read(numbers))
        return read_slots(slots)

    def gradients(self) -> list[torch.Tensor]:
        dense = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return [*dense, *self.tables.gradients()]

    def summed(self) -> Sequence[tuple[str, torch.Tensor]]:
        return self.named

    def close(self) -> None:
        self.tables.close()


PARTS = 4
"""Number of parts in which gradients arrive if early; each takes a call of the optimizer."""


class ByFlatGradients:
    """A reducer whose ``last_backward`` is that of its flat gradients."""

    flat_gradients: FlatGradients

    @property
    def last_backward(self) -> bool:
        """See Reducer."""
        return self.flat_gradients.last_backward

    @last_backward.setter
    def last_backward(self, value: bool) -> None:
        self.flat_gradients.last_backward = value


class FlatReducer(ByFlatGradients, WithNorm):
    """Sums gradients in one flat buffer over the ranks, and those of tables separately.

    Gradients of parameters that only this rank has (``own``) are complete without a sum; ``norm`` is then this rank's
    norm only, see Partition.

    Args:
        name: name of the candidate.
        named: all parameters.
        flat_gradients: the gradients in the flat buffer.
        sum_: sums the flat buffer.
        tables: sums the rows of tables.
        own: reducer of this rank's own parameters, if any.
        residue: rounding error of int8 sums.
        arrive: StreamedAllreduce.arrive; None if all sums arrive at once.
        needs_norm: whether each update needs the norm.
    """

    def __init__(
        self,
        name: str,
        named: Sequence[tuple[str, Parameter]],
        flat_gradients: FlatGradients,
        sum_: allreduce.TensorAllreduce,
        tables: SparseGradients | None = None,
        own: NoReducer | None = None,
        residue: Residue | None = None,
        arrive: Callable[[float], None] | None = None,
        needs_norm: bool = False,
    ) -> None:
        self.residue, self.needs_norm = residue, needs_norm
        self.arrive = arrive
        self.early = self.has_loss = False
        """Early: the loss is sent first, ``exchange`` waits only for the loss, and ``parts`` waits for gradients."""
        self.name, self.named = name, named
        self.flat_gradients = flat_gradients
        self.sum = sum_
        boundary = flat_gradients.layout.gradients
        self.values = sum_.flat[:boundary]
        self.converts = any(one.dtype.to_real() != sum_.flat.dtype for one in flat_gradients.parameters)
        self.slots = sum_.flat[boundary:]
        self.others = [one for one in (tables, own) if one is not None]
        self.arrivals = flat_gradients.parts(PARTS)
        flat_gradients.attach()

    def let_arrive_early(self, allowed: bool) -> None:
        """See Reducer."""
        self.early = allowed and self.arrive is not None and not self.converts

    def begin(self) -> None:
        self.known_norm = None
        self.flat_gradients.begin()
        for one in self.others:
            one.begin()

    def before_backward(self, totals: Callable[[], tuple[Number, Number | None]]) -> None:
        """See Reducer."""
        if self.early and self.last_backward:
            self.put_loss(*totals())

    def put_loss(self, loss: Number, weight: Number | None) -> None:
        """Sets the loss and weight for ``exchange``; called before the first gradient if they are sent early."""
        fill_slots(self.slots.zero_(), loss, weight)
        if self.early:
            self.sum.start(len(self.values), len(self.sum.flat))
        self.has_loss = True

    def exchange(self, loss: Number = 0.0, weight: Number | None = None) -> ExchangeResult:
        if not self.has_loss:
            self.put_loss(loss, weight)
        self.has_loss = False
        self.flat_gradients.complete()
        if self.early and self.arrive is not None:
            self.arrive(1)
            return read_slots(self.slots.tolist())
        self.finish()
        for one in self.others:
            one.exchange()
        numbers = self.slots
        if self.needs_norm:
            numbers = torch.cat([numbers, norm_of(self.gradients()).to(numbers).view(1)])
        self.known_norm, slots = taken_apart(numbers.tolist())
        return read_slots(slots)

    def parts(self, clock: StepClock) -> Iterator[list[torch.Tensor]]:
        """See Reducer."""
        if not self.early or self.arrive is None:
            yield self.gradients()
            return
        for buckets, elements, members in self.arrivals:
            self.arrive(1 + buckets.stop)
            self.flat_gradients.publish(members)
            clock.mark(Phase.EXCHANGE)
            yield [self.sum.flat[elements]]
        self.finish()

    def finish(self) -> None:
        """Waits until all dense gradients are summed."""
        self.sum.finish()
        self.flat_gradients.publish()
        self.flat_gradients.restart()

    def gradients(self) -> list[torch.Tensor]:
        dense = [self.values]
        if self.converts:  # then ``grad`` is not always a view of the buffer
            dense = [parameter.grad for parameter in self.flat_gradients.parameters if parameter.grad is not None]
        return [*dense, *(gradient for one in self.others for gradient in one.gradients())]

    def summed(self) -> Sequence[tuple[str, torch.Tensor]]:
        return self.named

    def close(self) -> None:
        self.flat_gradients.detach()
        self.sum.close()
        for one in self.others:
            one.close()


def divided(
    named: Sequence[tuple[str, Parameter]], sparse: Container[int]
) -> tuple[list[tuple[str, Parameter]], list[Parameter]]:
    """Divides parameters into (name, parameter) pairs with dense gradients, and those whose ids are in ``sparse``."""
    dense = [(name, parameter) for name, parameter in named if id(parameter) not in sparse]
    return dense, [parameter for _, parameter in named if id(parameter) in sparse]


@dataclass(frozen=True)
class TorchReducers:
    """Reducers of one model, which must be on its device already; see reducer_choice.Reducers."""

    model: Parameters
    """A module, whose parameters count that require gradients; or some parameters, which all count."""
    config: ReduceConfig
    sparse: Sequence[Parameter] = ()
    """Parameters whose gradients stay sparse."""
    own: Sequence[Parameter] = ()
    """Parameters that no other rank has, so that their gradients are complete and not exchanged."""
    needs_norm: bool = False
    """Whether each update needs the norm of these gradients."""

    def possible(self, config: ReduceConfig, world: World) -> list[Candidate]:
        device = next((parameter.device for _, parameter in self.model.named_parameters()), torch.device("cpu"))

        def has_horovod() -> bool:  # called on all ranks or on none
            there = world.data.allgather(horovod_setup.available("torch"), "look for Horovod")
            return all(there) and messages.unfit(horovod_setup.load("torch"), world.data, device) is None

        on_gpu, own_gpus = device.type != "cpu", each_has_a_gpu(world, device)
        return candidates(config, look_around(config, world, on_gpu, has_horovod, word_of(device), own_gpus))

    def open(self, candidate: Candidate, group: Group) -> Reducer:
        """Opens a candidate's reducer. Collective over the group.

        Raises:
            UserError: Horovod is missing or does not fit.
        """
        config = self.config
        sparse_ids, own_ids = ({id(parameter) for parameter in some} for some in (self.sparse, self.own))
        is_share = not isinstance(self.model, Module)  # its parameters may be frozen now and trained again later
        wanted = [(name, one) for name, one in self.model.named_parameters() if is_share or one.requires_grad]
        shared = [pair for pair in wanted if id(pair[1]) not in own_ids]
        parameters, rows_of = divided(shared, sparse_ids)
        if candidate.kind == "none":
            return NoReducer(parameters, SparseGradients(rows_of), config.sparse, self.needs_norm)
        dtype, device = common_kind(wanted)
        most, ends = bucket_sizes(config, candidate, dtype, device)
        layout = plan([as_real(one).numel() for _, one in parameters], most, SLOTS, ends)
        residue = residue_of(candidate, layout, config.compress_after_steps)
        sum_: allreduce.TensorAllreduce
        over: ProcessGroup | Group = group
        if candidate.kind == "mpi":
            candidate, sum_ = allreduce.open_tensor_allreduce(candidate, group, layout, dtype, device, residue)
        else:
            sender: messages.Sender
            if candidate.kind == "horovod":
                sender = messages.horovod_sender(group, device)
            else:
                sender = messages.GroupSender(peers_of(group, device))
                over = peers_of(group, device) if rows_of else group
            half = messages.HALVES.get(candidate.compression)
            sum_ = messages.MessageAllreduce(sender, layout, dtype, device, half)

        def ready(number: int) -> None:
            end = layout.gradients if reducer.early else layout.length
            sum_.start(layout.buckets[number].begin, min(layout.buckets[number].end, end))

        gradients = FlatGradients(parameters, sum_.flat, layout, ready, config.sparse)
        tables = SparseGradients(rows_of, over, dtype)
        arrive = sum_.arrive if isinstance(sum_, allreduce.HostTensorAllreduce) and not (rows_of or own_ids) else None
        own_dense, own_rows = divided([pair for pair in wanted if id(pair[1]) in own_ids], sparse_ids)
        alone = NoReducer(own_dense, SparseGradients(own_rows), config.sparse) if own_ids else None
        named = wanted if own_ids else parameters
        norm = self.needs_norm
        reducer = FlatReducer(candidate.name, named, gradients, sum_, tables, alone, residue, arrive, norm)
        return reducer


def bucket_sizes(
    config: ReduceConfig, candidate: Candidate, dtype: torch.dtype, device: torch.device
) -> tuple[int | None, int | None]:
    """Elements of buckets, and of the first and last one if they differ; None for a candidate that has no buckets."""
    if candidate.way != "overlap":
        return None, None
    on_gpu = device.type != "cpu"
    most = config.bucket_bytes or (GPU_BUCKET_BYTES if on_gpu else BUCKET_BYTES)
    most = min(most, PIECE_BYTES) if candidate.kind == "mpi" else most
    return max(1, most // dtype.itemsize), max(1, min(most, END_BYTES) // dtype.itemsize) if on_gpu else None


def measured_reducer(
    config: ReduceConfig,
    world: World,
    model: Module,
    rehearse: Callable[[Reducer], object],
    chosen: str | None = None,
    announce: Callable[[Choice], object] | None = None,
    sparse: Sequence[Parameter] = (),
) -> Reducer:
    """Opens the reducer that the configuration names or, for ``auto``, the fastest one here. Collective.

    Args:
        config: the run file's reduce section.
        world: the ranks.
        model: its parameters must be on their device already.
        rehearse: runs forward, backward and ``exchange`` once with the given reducer, and leaves the model as it was.
        chosen: name of an earlier choice, to be used without measuring.
        announce: called with the result if candidates were measured.
        sparse: tables whose gradients stay sparse, so that only rows are sent; others are made dense.

    Raises:
        UserError: the configured kind cannot be used here, for example Horovod that is not installed.
    """
    return ReducerChoice(config, world, chosen, announce).reducer(TorchReducers(model, config, sparse), rehearse)


def fill_slots(slots: torch.Tensor | list[Number], loss: Number, weight: Number | None) -> None:
    """Puts this rank's part of the loss, and its weight if there is one, into zeroed slots."""
    slots[LOSS] = loss
    if weight is not None:
        slots[WEIGHT] = weight
        slots[WEIGHTED] = 1.0


def taken_apart(numbers: list[float]) -> tuple[float | None, list[float]]:
    """The norm that follows the slots, if it does, and the slots."""
    return next(iter(numbers[SLOTS:]), None), numbers[:SLOTS]


def norm_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """L2 norm over all elements of all tensors, on their device."""
    if not tensors:
        return torch.zeros(())
    norms = torch._foreach_norm(list(tensors))
    return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]


def read(numbers: Sequence[Number]) -> list[float]:
    """Numbers as floats; those on a device are read together, in one wait for it."""
    there = [one.detach().double().view(()) for one in numbers if isinstance(one, torch.Tensor)]
    found = iter(torch.stack(there).tolist() if there else [])
    return [next(found) if isinstance(one, torch.Tensor) else one for one in numbers]


def broadcast(group: Group, tensors: Sequence[torch.Tensor], what: str, peers: ProcessGroup | None = None) -> None:
    """Overwrites tensors with those of the group's rank 0. Collective.

    Args:
        group: the ranks, such as ``world.data``.
        tensors: on any device, of the same shapes and dtypes on every rank.
        what: completes "waited for the other ranks to ..." in an error.
        peers: process group of the same ranks, which sends them from device to device; None: through host memory.
    """
    if group.comm is None:
        return
    for tensor in tensors:
        device = "cpu" if peers is None else tensor.device
        copy = tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)
        if peers is None:
            group.broadcast_array(copy.view(-1).view(torch.uint8).numpy(), what)
        elif copy.numel():
            peers.broadcast(copy.view(-1).view(torch.uint8), 0, what)()
        with torch.no_grad():
            tensor.copy_(copy)


def common_kind(parameters: Sequence[tuple[str, Parameter]]) -> tuple[torch.dtype, torch.device]:
    """The dtype in which gradients are summed, and their device."""
    if not parameters:
        raise UserError(
            "the model has no parameter that requires a gradient", "leave requires_grad on for what is to be trained"
        )
    devices = {parameter.device for _, parameter in parameters}
    if len(devices) > 1:
        raise UserError(
            f"the model is spread over {len(devices)} devices", "put all parameters of a rank on one device"
        )
    wide = any(parameter.dtype.to_real() == torch.float64 for _, parameter in parameters)
    return torch.float64 if wide else torch.float32, devices.pop()
