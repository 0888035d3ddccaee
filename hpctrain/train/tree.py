"""Nested values, such as a ``state_dict`` gives them, as flat arrays and a text that says how they belong together.

The text depends on the structure only, not on the numbers in it: from save to save the arrays keep their shapes.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import UserError, kind_of
from hpctrain.train.state import ArrayTensor, Placement, StateTensor

STRUCTURE, INTEGERS, FLOATS = "structure", "integers", "floats"
LEAF_NAME = re.compile(r"(?!\.+$)[^/\x00-\x1f\x7f\ud800-\udfff]{1,200}")
"""What can be part of a tensor's name."""
LEAST_ITEMS = 8
"""Of an array that is padded, so that it keeps its shape while texts and lists grow a little."""


class Leaves(Protocol):
    """What a nested value may hold besides Python's own: it becomes a tensor of the state, and comes back as it was."""

    def kind(self, value: Any) -> str | None:
        """What has to be known of a value to give it back; None if it is not a leaf."""

    def tensor(self, name: str, value: Any, placement: Placement) -> StateTensor:
        """A leaf under a name."""

    def value(self, kind: str, array: NDArray[Any]) -> Any:
        """The leaf, from its kind and what was saved of it."""


class HostLeaves:
    """NumPy's arrays and numbers, and bytes."""

    def kind(self, value: Any) -> str | None:
        if isinstance(value, np.ndarray):
            return "array"
        if isinstance(value, bytes):
            return "bytes"
        return "number" if isinstance(value, np.generic) and not isinstance(value, (float, str)) else None

    def tensor(self, name: str, value: Any, placement: Placement) -> StateTensor:
        array = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.asarray(value)
        return ArrayTensor(name, array.astype(array.dtype.newbyteorder("="), copy=False), placement)

    def value(self, kind: str, array: NDArray[Any]) -> Any:
        if kind == "bytes":
            return array.tobytes()
        return np.array(array)[()] if kind == "number" else np.array(array)


@dataclass
class Tree:
    """A nested value, taken apart."""

    structure: Any = None
    """JSON: a value is a list of its kind and its content."""
    integers: list[int] = field(default_factory=list)
    """Whole numbers and truth values."""
    floats: list[float] = field(default_factory=list)
    leaves: dict[str, Any] = field(default_factory=dict)
    """What the caller can store (arrays, tensors), by names that tell where they are held."""

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All but the leaves, by name."""
        found = {STRUCTURE: np.frombuffer(json.dumps(self.structure, separators=(",", ":")).encode(), np.uint8)}
        if self.integers:
            found[INTEGERS] = np.array(self.integers, np.int64)
        return found | ({FLOATS: np.array(self.floats, np.float64)} if self.floats else {})


def take_apart(value: Any, describe: Callable[[Any], Any], where: str) -> Tree:
    """Takes a value apart.

    Args:
        value: None, truth values, numbers, strings, leaves, and dicts (keys: strings, whole numbers), lists and tuples
            of them.
        describe: what ``put_together`` has to know of a leaf, JSON-able; None if a value is not a leaf.
        where: names the value in errors.

    Raises:
        UserError: there is something else in it.
    """
    tree = Tree()
    try:
        tree.structure = _node(value, describe, where, (), tree)
    except RecursionError:
        raise UserError(f"{where} is nested too deeply, or holds itself", "return a flatter value") from None
    return tree


def put_together(arrays: Mapping[str, NDArray[Any]], leaf: Callable[[str, Any], Any], where: str) -> Any:
    """The value, from what ``Tree.arrays`` gave.

    Args:
        arrays: by name.
        leaf: gives a leaf by its name and its description.
        where: names the value in errors.

    Raises:
        UserError: the arrays do not make up a value.
    """
    integers, floats = iter(arrays.get(INTEGERS, ())), iter(arrays.get(FLOATS, ()))

    def value(node: Any) -> Any:
        kind, content = node
        if kind == "leaf":
            return leaf(*content)
        if kind == "dict":
            return {key: value(item) for key, item in content}
        if kind in ("list", "tuple"):
            items = [value(item) for item in content]
            return items if kind == "list" else tuple(items)
        if kind == "float":
            return float(next(floats))
        if kind == "big":
            return int(content, 16)
        return {"int": int, "bool": bool}[kind](next(integers)) if kind in ("int", "bool") else content

    try:
        return value(json.loads(arrays[STRUCTURE].tobytes()))
    except (ValueError, TypeError, KeyError, StopIteration, RecursionError) as error:
        raise UserError(f"what was saved of {where} cannot be put together", "use another checkpoint") from error


def tree_tensors(name: str, value: Any, placement: Placement, leaves: Leaves, where: str) -> list[StateTensor]:
    """A nested value as named tensors: ``<name>/structure``, ``integers``, ``floats``, and one for each leaf.

    Raises UserError if it holds what cannot be saved.
    """
    tree = take_apart(value, leaves.kind, where)
    tensors: list[StateTensor] = [
        ArrayTensor(f"{name}/{key}", padded(array), placement) for key, array in tree.arrays().items()
    ]
    return tensors + [leaves.tensor(f"{name}/{key}", leaf, placement) for key, leaf in tree.leaves.items()]


def tree_value(arrays: Mapping[str, NDArray[Any]], leaves: Leaves, where: str) -> Any:
    """What ``tree_tensors`` took apart, from its arrays by their names without the first part. Raises UserError."""
    return put_together(arrays, lambda name, kind: leaves.value(kind, arrays[name]), where)


def padded(array: NDArray[Any]) -> NDArray[Any]:
    """A text with blanks, or numbers with zeros, which ``put_together`` passes over: the length is a power of two."""
    length = max(LEAST_ITEMS, 1 << (len(array) - 1).bit_length())
    filling = ord(" ") if array.dtype == np.uint8 else 0
    return np.pad(array, (0, length - len(array)), constant_values=filling)


def _leaf_name(path: tuple[str, ...], tree: Tree) -> str:
    """Keys and indices on the way to a leaf, or a number if that is not a name, or taken."""
    name = ".".join(path)
    if LEAF_NAME.fullmatch(name) and name not in tree.leaves and name not in (STRUCTURE, INTEGERS, FLOATS):
        return name
    numbers = map(str, itertools.count(len(tree.leaves)))
    return next(number for number in numbers if number not in tree.leaves)


def _node(value: Any, describe: Callable[[Any], Any], where: str, path: tuple[str, ...], tree: Tree) -> list[Any]:
    description = describe(value)
    if description is not None:
        name = _leaf_name(path, tree)
        tree.leaves[name] = value
        return ["leaf", [name, description]]
    if isinstance(value, (bool, int)) and -(2**63) <= value < 2**63:
        tree.integers.append(int(value))
        return ["bool" if isinstance(value, bool) else "int", None]
    if isinstance(value, int) and abs(value) < 2**256:  # the state of a random generator: text of a fixed length
        return ["big", f"{value:+065x}"]
    if isinstance(value, float):
        tree.floats.append(value)
        return ["float", None]
    if value is None or isinstance(value, str):
        return ["value", value]
    if isinstance(value, (list, tuple)):
        items = [
            _node(item, describe, f"{where}, {number}", (*path, str(number)), tree) for number, item in enumerate(value)
        ]
        return ["list" if isinstance(value, list) else "tuple", items]
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        nodes = (
            (key, _node(item, describe, f"{where}, {key}", (*path, str(key)), tree)) for key, item in value.items()
        )
        return ["dict", [[key, node] for key, node in nodes]]
    raise UserError(
        f"{where} is {kind_of(value)}, which cannot be saved",
        "build it of dicts (keys: strings, whole numbers), lists, tuples, numbers, strings, bytes, arrays and tensors",
    )
