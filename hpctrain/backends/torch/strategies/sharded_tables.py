"""``parallel.shard: tables``: embedding tables split by rows over ranks that see different samples.

Each index that a batch needs is sent to the rank that has the row; its vector comes back, and later the gradient goes
there. A row's gradient is therefore complete where the row is, and tables take no part in sums over the ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module
from torch.nn.functional import embedding, embedding_bag
from torch.optim import Optimizer

from hpctrain.backends.named_state import parameter_of
from hpctrain.backends.torch.reduce.gradients import watched
from hpctrain.backends.torch.strategies.estimated import Estimated
from hpctrain.backends.torch.strategies.memory_estimate import MemoryEstimate, of_state
from hpctrain.backends.torch.strategies.parameter_traits import plain, require_elementwise
from hpctrain.backends.torch.strategies.partition import Named, Partition, Slices
from hpctrain.backends.torch.strategies.row_shares import part_of_rows
from hpctrain.backends.torch.strategies.strategy import Opening, Prepared, Strategy
from hpctrain.backends.torch.strategies.tensor import CutLayer, keep_own, named_layers, require_same_cut
from hpctrain.backends.torch.strategies.tp_group import TPGroup
from hpctrain.comm.group import Group
from hpctrain.config.features import Feature
from hpctrain.errors import UserError
from hpctrain.tasks.definition import LayerCut
from hpctrain.train.clock import Neighbours

END = ""
"""Where ranks meet that have done all lookups of a forward pass, or received all gradients of a backward pass."""
SAY, ASK, GIVE = "say what rows they need", "ask for rows of a table", "give rows of a table"
"""Each completes "waited for the other ranks to ..." in errors."""


class ShardedTables(Partition):
    """The partition of a model whose tables are split over ranks that see different samples."""

    def __init__(
        self, tp_group: TPGroup, slices: Mapping[str, Slices], cut: frozenset[int], end: Lookup, guard: TableGuard
    ) -> None:
        super().__init__(tp_group, slices, cut)
        self.sync_group = tp_group.group
        self.end = end
        """The meeting at the end of a forward pass."""
        self.guard = guard

    @property
    def hint(self) -> str:
        """Empty: the guard explains errors."""
        return ""

    def passing(self) -> contextlib.AbstractContextManager[None]:
        """See Partition. Inside, only lookups may read the tables' weights."""
        return self.guard.up()

    def finish(self, device: torch.device) -> None:
        """See Partition. Ranks meet after backward, too, or a rank whose loss needs no lookup would be waited for."""
        self.end.back.meet(device)

    @property
    def complete(self) -> frozenset[int]:
        """All split tables."""
        return self.cut

    def require_same_loss(self, loss: tuple[float, float], update: int) -> None:
        """Does nothing: ranks see different samples."""

    def require_whole_gradients(self, summed: Named, everyone: Group) -> None:
        """Does nothing: what is not split is summed over the ranks."""


@dataclass(frozen=True)
class Lookup:
    """A point in a pass at which ranks exchange rows."""

    tp_group: TPGroup
    place: int
    """Number of the table; negative for gradients on their way back."""
    names: Sequence[str]
    """Names of the tables, and END."""

    @property
    def back(self) -> Lookup:
        """The point at which the gradients are sent back."""
        return replace(self, place=-1 - self.place)

    @property
    def place_name(self) -> str:
        """The point in words, for messages."""
        name = self.names[max(self.place, -1 - self.place)]
        if name == END:
            return f"the end of a {'forward' if self.place >= 0 else 'backward'} pass"
        return name if self.place >= 0 else f"gradients of {name}"

    def meet(self, device: torch.device) -> None:
        """Waits until all ranks are here; raises the errors of ``coming``."""
        self.coming([0] * self.tp_group.group.size, device)

    def coming(self, going: Sequence[int], device: torch.device) -> list[int]:
        """Exchanges numbers of rows; returns how many each rank has for this one. Collective.

        Args:
            going: number of rows that this rank has for each rank.
            device: device of the rows.

        Raises:
            UserError: the ranks are at different points, and would mix up their rows; raised on all ranks.
        """
        each = [1] * len(going)
        announced = torch.tensor([[self.place, count] for count in going], device=device)
        places, counts = self.tp_group.exchange.swap(announced, each, each, SAY).t().tolist()
        if others := [replace(self, place=place) for place in places if place != self.place]:
            raise UserError(
                f"the ranks' passes differ while parallel.shard is tables: one has reached {self.place_name}, another "
                f"{others[0].place_name}",
                "let all ranks look up the same tables in the same order, if need be without any index, and let their "
                "losses depend on the results whatever their samples are; or leave parallel.shard out",
            )
        return list(counts)


class Sent(torch.autograd.Function):
    """Sends rows to the ranks that need them; in backward, sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, going: Sequence[int], coming: Sequence[int], lookup: Lookup) -> Tensor:
        ctx.going, ctx.coming, ctx.lookup = going, coming, lookup
        return lookup.tp_group.exchange.swap(rows, going, coming, GIVE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        back = ctx.lookup.back
        back.coming(ctx.coming, gradients[0].device)
        return sent(gradients[0], ctx.coming, ctx.going, back), None, None, None


def sent(rows: Tensor, going: Sequence[int], coming: Sequence[int], lookup: Lookup) -> Tensor:
    """Exchanges rows; returns those that all ranks have for this one. Differentiable.

    Args:
        rows: float[sum of ``going``, width], in order of the rank they go to.
        going: number of rows for each rank.
        coming: number of rows from each rank.
        lookup: the lookup that needs them.
    """
    return cast(Tensor, Sent.apply(rows, going, coming, lookup))  # type: ignore[no-untyped-call]


def tables_of(model: Module, words: Mapping[str, Any]) -> list[CutLayer]:
    """The tables that a task marks by ``vocabulary``; changes nothing.

    Raises UserError, naming the table, if one cannot be split or has hooks; or if there are none.
    """
    marked = {name: word for name, word in words.items() if not isinstance(word, LayerCut) or word.kind == "vocabulary"}
    tables = named_layers(model, marked, {"vocabulary": (Embedding, EmbeddingBag)})
    if not tables:
        raise UserError(
            "parallel.shard is tables, and tensor= of the task marks no table by hpctrain.vocabulary",
            "return TorchTask(..., tensor={'tables.*': hpctrain.vocabulary}), or leave parallel.shard out",
        )
    require_same_cut(model, tables, "give each its own")
    for one in tables:
        if watched(cast(Tensor, one.layer._parameters["weight"])):
            raise UserError(
                f"parallel.shard is tables, and {one.name}.weight has hooks of its gradient (register_hook), which "
                "would see only that of a rank's rows",
                "leave the hooks out: train.clip_norm clips gradients, and parameter groups have separate rates; "
                "or leave parallel.shard out",
            )
    return tables


def cut_tables(
    model: Module, tables: Sequence[CutLayer], tp_group: TPGroup, optimizers: Sequence[Optimizer]
) -> ShardedTables:
    """Leaves each rank its rows of each table and of optimizer state, in place. Does not communicate.

    Args:
        model: whole, and equal on all ranks.
        tables: the result of ``tables_of``.
        tp_group: the ranks, which see different samples.
        optimizers: optimizers of its parameters.

    Raises:
        UserError: an optimizer updates a part differently from the whole parameter.
    """

    def own_rows(shape: tuple[int, ...], axis: int, parts: int) -> Slices:
        begin, end = part_of_rows(shape[0], tp_group.group.rank, tp_group.group.size)
        return Slices(shape, 0, (begin,), end - begin, 0, 1)

    rows = [len(one.layer.weight) for one in tables]  # type: ignore[arg-type]
    slices, cut = keep_own(model, tables, optimizers, own_rows)
    names, guard = [*(one.name for one in tables), END], TableGuard()
    for place, one in enumerate(tables):
        lookup = Lookup(tp_group, place, names)
        forward = bags if isinstance(one.layer, EmbeddingBag) else vectors
        one.layer.forward = functools.partial(forward, one, rows[place], lookup)
        guard.keep(one)
    end = Lookup(tp_group, len(tables), names)

    def meet(module: Module, *ignored: Any) -> None:
        end.meet(next(module.parameters()).device)

    model.register_forward_hook(meet)
    return ShardedTables(tp_group, slices, cut, end, guard)


class TableGuard:
    """Lets only lookups use the weights of tables; refuses any other use, which would take a part for the whole."""

    def __init__(self) -> None:
        self.is_up = False
        """Whether ``parameters()`` of the model, too, returns weights that cannot be computed with."""

    @contextlib.contextmanager
    def up(self) -> Iterator[None]:
        """Sets ``is_up`` in the body."""
        self.is_up = True
        try:
            yield
        finally:
            self.is_up = False

    def keep(self, one: CutLayer) -> None:
        """Guards a table."""

        def refused(layer: object) -> Tensor:
            raise UserError(
                f"{one.name}.weight is used, and each rank has different rows of it while parallel.shard is tables",
                "use what is looked up, leave weight decay to the optimizer, or leave parallel.shard out",
            )

        class Unseen(Tensor):
            """A weight's properties without its values."""

            _is_param = True

            @classmethod
            def __torch_function__(cls, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if called not in OUTSIDE:
                    refused(cls)
                with torch._C.DisableTorchFunctionSubclass():
                    return called(*args, **kwargs or {})

        def parameters(layer: Module) -> dict[str, Any]:
            if not self.is_up:
                return held_by(layer)
            weight = held_by(layer)["weight"]
            return {"weight": Tensor._make_subclass(Unseen, weight.data, weight.requires_grad)}

        kind, own = type(one.layer), {"weight": property(refused), "_parameters": property(parameters)}
        one.layer.__class__ = type(kind.__name__, (kind,), own)


OUTSIDE = {
    *(getattr(Tensor, name).__get__ for name in ("device", "dtype", "is_cuda", "is_meta", "layout", "ndim")),
    *(getattr(Tensor, name).__get__ for name in ("nbytes", "requires_grad", "shape")),
    *(Tensor.dim, Tensor.element_size, Tensor.is_complex, Tensor.is_floating_point, Tensor.numel, Tensor.size),
}
"""What may be asked of a tensor without its values: models look at the device of their first parameter."""


def held_by(layer: Module) -> dict[str, Any]:
    """A layer's parameters, guarded or not."""
    found: dict[str, Any] = layer.__dict__["_parameters"]
    return found


def bags(
    one: CutLayer,
    rows: int,
    lookup: Lookup,
    indices: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    """Replaces ``forward`` of an EmbeddingBag; see ``fetched``."""
    layer = one.layer
    assert isinstance(layer, EmbeddingBag), "tables_of has seen to it"
    places, vectors, padding = fetched(one, rows, lookup, indices)
    return embedding_bag(
        places,
        vectors,
        offsets,
        mode=layer.mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=layer.include_last_offset,
        padding_idx=padding,
    )


def vectors(one: CutLayer, rows: int, lookup: Lookup, indices: Tensor) -> Tensor:
    """Replaces ``forward`` of an Embedding; see ``fetched``."""
    places, found, _ = fetched(one, rows, lookup, indices)
    return embedding(places, found)


def fetched(one: CutLayer, rows: int, lookup: Lookup, indices: Tensor) -> tuple[Tensor, Tensor, int | None]:
    """Fetches the rows of a table that this rank needs, each once, from the ranks that have them.

    Args:
        one: the table.
        rows: number of rows on all ranks together.
        lookup: the table's lookup.
        indices: int[...].

    Returns:
        For each index the position of its row, the rows, and the position of the padding row if it is among them.
    """
    layer, group = one.layer, lookup.tp_group.group
    assert isinstance(layer, Embedding | EmbeddingBag), "tables_of has seen to it"
    different, places = indices.unique(return_inverse=True)
    if different.numel() and not 0 <= int(different[0]) <= int(different[-1]) < rows:
        raise IndexError(f"index out of range in {one.name}: {int(different[0])} to {int(different[-1])}")
    share, padding = part_of_rows(rows, 0, group.size)[1], layer.padding_idx
    going = torch.bincount(different // share, minlength=group.size).tolist()
    coming = lookup.coming(going, indices.device)
    begin, end = part_of_rows(rows, group.rank, group.size)
    wanted = lookup.tp_group.exchange.swap(different.long(), going, coming, ASK) - begin
    untrained = padding - begin if padding is not None and begin <= padding < end else None
    weight = cast(Tensor, held_by(layer)["weight"])
    own = embedding(wanted, weight, untrained, sparse=layer.sparse)
    found = [] if padding is None else (different == padding).nonzero().flatten().tolist()
    return places, sent(own, coming, going, lookup), next(iter(found), None)


def planned(opening: Opening) -> Strategy | None:
    """The strategy, if the run shards tables. Raises UserError if the task marks no tables that can be split."""
    if Feature.SHARD_TABLES not in opening.features:
        return None
    tables = tables_of(opening.model, opening.task.tensor)
    return functools.partial(cut, opening, tables) if opening.world.data.size > 1 else None  # one process has all rows


def cut(opening: Opening, tables: Sequence[CutLayer], prepared: Prepared) -> Prepared:
    """Leaves this rank its rows of each table."""
    tp_group = opening.tp_group(opening.world.data, Neighbours.TABLES)
    partition = cut_tables(opening.model, tables, tp_group, opening.optimizers)
    return dataclasses.replace(prepared, partition=partition)


def estimate(model: Estimated) -> MemoryEstimate | None:
    """See estimated.Estimate. If tables cannot be split, raises UserError only if the run file asks for it."""
    framework = model.framework
    try:
        marked = tables_of(framework.model, framework.task.tensor)
    except UserError:
        if model.parallel.shard == "tables":
            raise
        return None
    optimizers = plain(framework.source.optimizer_state.every)
    model.traits  # noqa: B018  raises if the plan does not work with the model
    for one in marked:
        for optimizer in optimizers:
            require_elementwise(optimizer, one.layer.get_parameter("weight"), f"{one.name}.weight")
    tables = {f"{one.name}.weight": tuple(one.layer.get_parameter("weight").shape) for one in marked}
    state = [
        dataclasses.replace(one, shape=(part_of_rows(one.shape[0], 0, model.data)[1], *one.shape[1:]))
        if tables.get(parameter_of(one.name)) == one.shape
        else one
        for one in model.state
    ]
    whole = model.whole
    return dataclasses.replace(of_state(state, whole.activations, model.data), checkpoint=whole.checkpoint)
