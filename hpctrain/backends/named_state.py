"""Named tensors of a model and its optimizer: compared between ranks, and loaded by name."""

from __future__ import annotations

import abc
import hashlib
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from hpctrain.comm.group import Group
from hpctrain.errors import UserError
from hpctrain.system.array_types import Array
from hpctrain.train.saved_arrays import HeldArrays, SavedArrays, as_saved, merge, runs_of_rows
from hpctrain.train.state import Placement, StateTensor
from hpctrain.train.stateful import value_of

BLOCK_BYTES = 4 << 20
"""Size of the block of a value that is held in memory while loading."""
HELD = ("held/", "rng/held/")
"""Prefixes of names of state that a task keeps outside its model and optimizer slots."""
INNER = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which PyTorch programs save a model's state: Lightning, PyTorch's tutorials, timm, DeepSpeed."""
COMPILED = re.compile(r"(?<![^./])_orig_mod(\.|$)")
"""The part that torch.compile adds to the names of a module's contents in PyTorch."""


def plain_name(name: str) -> str:
    """The name of a tensor or module without the parts that torch.compile adds."""
    return COMPILED.sub("", name).removesuffix(".")


def endings(name: str) -> Iterator[str]:
    """A name and its dotted suffixes, the longest first."""
    yield name
    while "." in name:
        name = name.partition(".")[2]
        yield name


def parameter_of(name: str) -> str:
    """The name of the parameter that the state with this name belongs to."""
    kind, _, rest = name.partition("/")
    return rest.partition("/")[2] if kind == "optimizer" else rest


class Assignable(StateTensor):
    """A StateTensor that can be assigned."""

    @abc.abstractmethod
    def loading(self) -> AbstractContextManager[Callable[[Array, int], None]]:
        """Yields ``load(rows, first_row)``, which assigns rows in the form of ``copy_into``; call it for all rows."""


def load_tensors(tensors: Iterable[Assignable], arrays: Mapping[str, Array]) -> None:
    """Assigns all values by name; assigns none if a replicated one is missing or a shape differs.

    Of a sharded tensor, only this rank's part is loaded. Holds at most one block of BLOCK_BYTES, or one row, at a time.
    """
    wanted, source = list(tensors), as_saved(arrays)
    for tensor in wanted:
        if tensor.name not in source:
            if tensor.placement is Placement.RANK:
                continue
            raise UserError(
                f"{tensor.name} is missing from the loaded state",
                "load it into the model and optimizer that it was saved from",
            )
        shape = source.shape_of(tensor.name)
        own = tensor.cut.shape if tensor.cut else tensor.shape
        if shape != own:
            raise UserError(
                f"{tensor.name} has shape {list(own)} here and {list(shape)} in the loaded state",
                "load it into the model that it was saved from",
            )
    for tensor in wanted:
        if tensor.name in source and not source.is_current(tensor.name):
            assign_by_blocks(tensor, source)


@contextmanager
def merged_over(group: Group, tensors: Iterable[Assignable]) -> Iterator[None]:
    """Gives rank-local tensors one value on all ranks during the body, such as BatchNorm statistics for an evaluation.

    It is the value that one rank would load from a checkpoint (see ``merge``), so that what is judged is what is
    exported. Training continues with each rank's own. Collective.
    """
    own = [tensor for tensor in tensors if tensor.placement is Placement.RANK] if group.size > 1 else []
    values = {tensor.name: value_of(tensor) for tensor in own}
    sums = group.allgather([zlib.crc32(value.tobytes()) for value in values.values()], "compare statistics")
    differing = [tensor for tensor, *each in zip(own, *sums, strict=True) if len(set(each)) > 1]
    for tensor in differing:
        rows = group.gather(values[tensor.name], f"merge {tensor.name}")
        assign_by_blocks(tensor, HeldArrays({tensor.name: merge(list(rows), 0, tensor.dtype)}))
    try:
        yield
    finally:
        own_values = HeldArrays(values)
        for tensor in differing:
            assign_by_blocks(tensor, own_values)


def assign_by_blocks(tensor: Assignable, source: SavedArrays) -> None:
    """Assigns this rank's part of a saved value, a block of rows at a time."""
    shape = tensor.shape
    begin = tensor.cut.begin if tensor.cut else (0,) * len(shape)
    row_bytes = source.dtype_of(tensor.name).itemsize * math.prod(shape[1:])
    with tensor.loading() as load:
        for first, count in runs_of_rows(shape, row_bytes, BLOCK_BYTES) if shape else ():
            load(source.part(tensor.name, (begin[0] + first, *begin[1:]), (count, *shape[1:])), first)
        if not shape:
            load(source.part(tensor.name, (), ()), 0)


def refuse_unplaced(arrays: Iterable[str], taken: set[str]) -> None:
    """Raises UserError if a task's own state was saved that the task no longer has."""
    left = {name for name in arrays if name.startswith(HELD)} - taken
    if left:
        raise UserError(
            f"{min(left)} was saved, and the task has no place for it", "load it into the task that it was saved from"
        )


def require_same_model(group: Group, described: Sequence[tuple[str, tuple[int, ...], str]], kind: str) -> None:
    """Raises UserError, on every rank, if models differ in names, shapes or dtypes between ranks. Collective.

    Args:
        group: the ranks.
        described: (name, shape, dtype) of each tensor.
        kind: the framework's word for them: tensors, variables.
    """
    digests = group.allgather(hashlib.sha256(repr(list(described)).encode()).hexdigest(), "compare the models")
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        raise UserError(
            f"the model of rank {odd[0]} differs from that of rank 0 in the names, shapes or types of its {kind}",
            "build the same model on every rank; only data may depend on the rank",
        )


def digest(values: Iterable[Array]) -> str:
    """SHA-256, in hexadecimal, over C-contiguous arrays in order."""
    everything = hashlib.sha256()
    for value in values:
        everything.update(value.data)
    return everything.hexdigest()


def named_outputs(outputs: Any) -> dict[str, Any]:
    """A model's outputs by name: ``output``; ``output_0``, ``output_1``, ... for a list; or the keys of a mapping."""
    if isinstance(outputs, Mapping):
        return {str(name): value for name, value in outputs.items()}
    if isinstance(outputs, (tuple, list)):
        return {f"output_{index}": value for index, value in enumerate(outputs)}
    return {"output": outputs}
