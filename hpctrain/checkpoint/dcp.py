"""Reads parts of tensors from folders of torch.distributed.checkpoint (DCP).

Its file ``.metadata`` is a pickle that lists each tensor's chunks; a chunk is a range of bytes in a ``.distcp`` file,
by ``torch.save``. https://docs.pytorch.org/docs/stable/distributed.checkpoint.html

That pickle is parsed, not unpickled: names in it are text, which is never looked up, imported or called.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.backends.named_state import INNER
from hpctrain.checkpoint.format.boxes import Box, tiling_problem
from hpctrain.checkpoint.format.durable_files import reading
from hpctrain.checkpoint.format.layout import ITEM_TYPES, DamagedCheckpoint, TensorSpec
from hpctrain.checkpoint.read_retry import retry_read
from hpctrain.errors import UserError
from hpctrain.system.array_types import Array
from hpctrain.train.saved_arrays import SavedArrays, lies_in, require_inside

METADATA = ".metadata"


@dataclass(eq=False)
class Record:
    """An object in a pickle: the name of what would make it, the arguments, and the state to set."""

    name: str
    arguments: Sequence[Any] = ()
    state: Any = None


def parsed(content: bytes) -> Any:
    """The value in a pickle of DCP, with Records for objects and None for True and False, which are not needed.

    Raises errors of any type for other content.
    """
    stack: list[Any] = []
    outer: list[list[Any]] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in pickletools.genops(content):
        top: list[Any] = []
        count = len(opcode.stack_before)
        if pickletools.markobject in opcode.stack_before:
            top, stack, count = stack, outer.pop(), count - 2
        cut = len(stack) - count
        top = stack[cut:] + top
        del stack[cut:]
        match opcode.name:
            case "MEMOIZE":
                memo[len(memo)] = top[0]
            case "BINGET" | "LONG_BINGET":
                top = [memo[argument]]
            case "MARK":
                outer.append(stack)
                stack = []
            case "EMPTY_TUPLE" | "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                top = [tuple(top)]
            case "EMPTY_DICT":
                top = [{}]
            case "EMPTY_LIST":
                top = [[]]
            case "SETITEM" | "SETITEMS":
                top[0].update(zip(top[1::2], top[2::2], strict=True))
            case "APPEND" | "APPENDS":
                top[0].extend(top[1:])
            case "STACK_GLOBAL":
                top = [Record(".".join(top))]
            case "REDUCE" | "NEWOBJ":
                top = [Record(top[0].name, top[1])]
            case "BUILD":
                top[0].state = top[1]
            case _ if opcode.stack_after:  # numbers, text and None are arguments of their opcodes
                top = [argument]
        stack += top[:1]
    return stack[-1]


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where its values are."""

    box: Box
    path: Path
    begin: int
    """Offset in the file."""
    num_bytes: int


Listed = tuple[TensorSpec, list[Chunk]]
"""A tensor and its chunks."""
Places = Mapping[tuple[str, tuple[int, ...]], Mapping[str, Any]]
"""Where each chunk is, by its tensor's name and its first index."""
ReadTensor = Callable[[bytes, Path], Array]
"""read_tensor(content, path) decodes a tensor by ``torch.save``; raises UserError."""


def read(path: Path, read_tensor: ReadTensor) -> tuple[SavedArrays, dict[str, str]]:
    """Open a folder by its ``.metadata``: arrays (bfloat16 as uint16), read on access, and logical types, by name.

    If a model's state was saved with other state, as ``{"model": ..., "optimizer": ...}``, only the former is there.

    Raises:
        UserError: DCP did not write the file, or it has tensors that cannot be read.
        UnreadableCheckpoint: it cannot be read now; also on access to arrays.
        DamagedCheckpoint: a chunk is missing or differs from its description, on access to arrays.
    """
    with reading(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
        content = file.read()
    try:
        listed = parsed(content).state
        tensors = {name: entry.state for name, entry in listed["state_dict_metadata"].items() if entry.state}
        places = {
            (index.state["fqn"], lengths(offset)): info.state
            for index, info in listed["storage_data"].items()
            if (offset := index.state.get("offset"))
        }
        paths = {name: (listed["planner_data"] or {}).get(name, (name,)) for name in tensors}
        arrays = {name: listed_of(there, tensors[there], places, path) for name, there in of_model(paths).items()}
    except UserError:
        raise
    except Exception as error:  # any other content fails somewhere
        what = f"{path} is not a list of tensors by torch.distributed.checkpoint"
        raise UserError(what, "give a folder that torch.distributed.checkpoint.save wrote") from error
    return ChunkedArrays(arrays, read_tensor), {name: tensor.dtype for name, (tensor, _) in arrays.items()}


def of_model(paths: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """Names of the model's tensors in the folder, by name in the model.

    Args:
        paths: keys of the nested dicts in which a tensor was saved, by name in the folder.
    """
    key = next((key for key in INNER if any(path[0] == key and path[1:] for path in paths.values())), None)
    chosen = {name: path[key is not None :] for name, path in paths.items() if key in (None, path[0])}
    return {".".join(map(str, path)): name for name, path in chosen.items()}


def lengths(size: Record) -> tuple[int, ...]:
    """The values of a ``torch.Size``."""
    return tuple(size.arguments[0])


def listed_of(name: str, entry: Mapping[str, Any], places: Places, path: Path) -> Listed:
    """A tensor and its chunks. Raises UserError if its type cannot be read, other errors for other entries."""
    dtype, shape = entry["properties"].state[0].name.removeprefix("torch."), lengths(entry["size"])
    if dtype not in ITEM_TYPES:
        raise UserError(f"{name} of {path.parent} is {dtype}, which cannot be read", "save weights as 16-bit numbers")
    chunks = []
    for each in entry["chunks"]:
        box = Box(lengths(each.state["offsets"]), lengths(each.state["sizes"]))
        place = places[name, box.begin]
        file, begin, num_bytes = place["relative_path"], place["offset"], place["length"]
        if Path(file).name != file or min(begin, num_bytes) < 0 or not lies_in(box.begin, box.shape, shape):
            raise ValueError(name)
        chunks.append(Chunk(box, path.parent / file, begin, num_bytes))
    if problem := tiling_problem(shape, [chunk.box for chunk in chunks]):
        raise ValueError(f"{name}: {problem}")
    return TensorSpec(name, shape, dtype), chunks


class ChunkedArrays(SavedArrays):
    """Tensors of which each access reads the chunks that it needs; the last chunk is kept."""

    named: Mapping[str, Listed]

    def __init__(self, named: Mapping[str, Listed], read_tensor: ReadTensor) -> None:
        super().__init__(named)
        self.read_tensor = read_tensor
        self.recent: tuple[Chunk, Array] | None = None

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.named[name][0].shape

    def dtype_of(self, name: str) -> np.dtype[Any]:
        return ITEM_TYPES[self.named[name][0].dtype]

    def part(self, name: str, begin: tuple[int, ...], shape: tuple[int, ...]) -> Array:
        require_inside(name, begin, shape, self.shape_of(name))
        return retry_read(lambda: self._read_once(name, Box(begin, shape)))

    def _read_once(self, name: str, wanted: Box) -> Array:
        out = np.empty(wanted.shape, self.dtype_of(name))
        for chunk in self.named[name][1]:
            common = chunk.box.overlap(wanted)
            if common.size:
                values = self._values(chunk, out.dtype)
                out[common.seen_from(wanted.begin).index] = values[common.seen_from(chunk.box.begin).index]
        return out

    def _values(self, chunk: Chunk, dtype: np.dtype[Any]) -> Array:
        if self.recent is None or self.recent[0] is not chunk:
            self.recent = None
            with reading(chunk.path) as descriptor, open(descriptor, "rb", closefd=False) as file:
                file.seek(chunk.begin)
                content = file.read(chunk.num_bytes)
            values = self.read_tensor(content, chunk.path) if len(content) == chunk.num_bytes else None
            if values is None or (values.shape, values.dtype) != (chunk.box.shape, dtype):
                raise DamagedCheckpoint(f"{chunk.path} is damaged: at byte {chunk.begin} is not what {METADATA} lists")
            self.recent = chunk, values
        return self.recent[1]
