"""Named tensors of a model and its optimizer: compared over the ranks, and loaded by their names."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from numpy.typing import NDArray

from hpctrain.comm.group import Group
from hpctrain.errors import UserError
from hpctrain.train.saved_arrays import SavedArrays, as_saved, runs_of_rows
from hpctrain.train.state import Placement, StateTensor

BLOCK_BYTES = 4 << 20
"""Of a value that is loaded, held at a time."""
HELD = ("held/", "rng/held/")
"""Begin the names of what a task keeps outside its model and its optimizer's slots."""
COMPILED = re.compile(r"(?<![^./])_orig_mod(\.|$)")
"""Part of PyTorch's names of what is below a module that torch.compile returned."""


def plain_name(name: str) -> str:
    """The name of a tensor or module, whether the module that holds it was compiled or not."""
    return COMPILED.sub("", name).removesuffix(".")


def parameter_of(name: str) -> str:
    """The name of the parameter whose state has this name."""
    kind, _, rest = name.partition("/")
    return rest.partition("/")[2] if kind == "optimizer" else rest


class Assignable(StateTensor, Protocol):
    """One that takes over a value."""

    def loading(self) -> AbstractContextManager[Callable[[NDArray[Any], int], None]]:
        """``load(rows, first_row)`` takes over rows of a value as ``copy_into`` gives it; all must come in the body."""


def load_tensors(tensors: Iterable[Assignable], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Assigns all values by name, or none if a replicated one is missing or one has another shape.

    Of a tensor that is cut, the part that is here. Besides the tensors, one block of BLOCK_BYTES or a row is held.
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
        shape, own = source.shape_of(tensor.name), tensor.cut.shape if tensor.cut else tensor.shape
        if shape != own:
            raise UserError(
                f"{tensor.name} has shape {list(own)} here and {list(shape)} in the loaded state",
                "load it into the model that it was saved from",
            )
    for tensor in wanted:
        if tensor.name in source and not source.is_current(tensor.name):
            assign_by_blocks(tensor, source)


def assign_by_blocks(tensor: Assignable, source: SavedArrays) -> None:
    """Assigns what is here of a saved value, a block of rows at a time."""
    shape = tensor.shape
    begin = tensor.cut.begin if tensor.cut else (0,) * len(shape)
    row_bytes = source.dtype_of(tensor.name).itemsize * math.prod(shape[1:])
    with tensor.loading() as load:
        for first, count in runs_of_rows(shape, row_bytes, BLOCK_BYTES) if shape else ():
            load(source.part(tensor.name, (begin[0] + first, *begin[1:]), (count, *shape[1:])), first)
        if not shape:
            load(source.part(tensor.name, (), ()), 0)


def refuse_unplaced(arrays: Iterable[str], taken: set[str]) -> None:
    """Raises UserError if something of a task's own was saved for which there is no place."""
    left = {name for name in arrays if name.startswith(HELD)} - taken
    if left:
        raise UserError(
            f"{min(left)} was saved, and the task has no place for it", "load it into the task that it was saved from"
        )


def require_same_model(group: Group, described: Sequence[tuple[str, tuple[int, ...], str]], kind: str) -> None:
    """Raises UserError, on every rank, if ranks built models of different names, shapes or types. Collective.

    Args:
        group: the ranks.
        described: (name, shape, dtype) of each tensor.
        kind: what the framework calls them: tensors, variables.
    """
    digests = group.allgather(hashlib.sha256(repr(list(described)).encode()).hexdigest(), "compare the models")
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        raise UserError(
            f"the model of rank {odd[0]} differs from that of rank 0 in the names, shapes or types of its {kind}",
            "build the same model on every rank; only data may depend on the rank",
        )


def digest(values: Iterable[NDArray[Any]]) -> str:
    """SHA-256 over C-contiguous values in order, hexadecimal."""
    everything = hashlib.sha256()
    for value in values:
        everything.update(value.data)
    return everything.hexdigest()


def named_outputs(outputs: Any) -> dict[str, Any]:
    """Outputs of a model by name: ``output``; ``output_0``, ``output_1``, ... of a list; or as the model names them."""
    if isinstance(outputs, Mapping):
        return {str(name): value for name, value in outputs.items()}
    if isinstance(outputs, (tuple, list)):
        return {f"output_{index}": value for index, value in enumerate(outputs)}
    return {"output": outputs}
