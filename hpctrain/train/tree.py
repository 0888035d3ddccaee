"""Flattens nested values, such as a ``state_dict``, into arrays and a JSON description of their structure.

The JSON depends on the structure only, not on numbers in it, so the arrays keep their shapes from save to save.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpctrain.errors import UserError, kind_of
from hpctrain.system.array_types import Array
from hpctrain.train.state import ArrayTensor, Placement, StateTensor

STRUCTURE, INTEGERS, FLOATS = "structure", "integers", "floats"
LEAF_NAME = re.compile(r"(?!\.+$)[^/\x00-\x1f\x7f\ud800-\udfff]{1,200}")
"""Valid as the last part of a tensor's name."""
LEAST_ITEMS = 8
"""Minimum length of padded arrays, so that shapes stay the same while texts and lists grow a little."""


class Leaves:
    """Handles leaves: values other than Python's own, each saved as a tensor of the state and restored as it was. Here
    they are on the host: NumPy arrays and scalars, and bytes; a framework adds its tensors."""

    def kind(self, value: Any) -> str | None:
        """What is needed besides the data to restore a value; None if it is not a leaf."""
        if isinstance(value, bytes):
            return "bytes"
        if not isinstance(value, (np.ndarray, np.generic)) or isinstance(value, float):
            return None
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return kind if value.dtype.kind in "biufc" else None

    def tensor(self, name: str, value: Any, placement: Placement) -> StateTensor:
        """The tensor that saves a leaf under this name."""
        array = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.asarray(value)
        return ArrayTensor(name, array.astype(array.dtype.newbyteorder("="), copy=False), placement)

    def value(self, kind: str, array: Array) -> Any:
        """Restores a leaf from its kind and its saved array."""
        if kind == "bytes":
            return array.tobytes()
        return np.array(array)[()] if kind == "number" else np.array(array)


@dataclass
class Tree:
    """A nested value, flattened."""

    structure: Any = None
    """JSON: each value is a list of its kind and its content."""
    integers: list[int] = field(default_factory=list)
    """All ints and bools, in order of occurrence."""
    floats: list[float] = field(default_factory=list)
    leaves: dict[str, Any] = field(default_factory=dict)
    """What the caller can store (arrays, tensors), named by the path to it."""

    def arrays(self) -> dict[str, Array]:
        """Everything but the leaves, as arrays by name."""
        found = {STRUCTURE: np.frombuffer(json.dumps(self.structure, separators=(",", ":")).encode(), np.uint8)}
        if self.integers:
            found[INTEGERS] = np.array(self.integers, np.int64)
        return found | ({FLOATS: np.array(self.floats, np.float64)} if self.floats else {})


def take_apart(value: Any, describe: Callable[[Any], Any], where: str) -> Tree:
    """Flattens a nested value.

    Args:
        value: None, bools, numbers, strings and leaves, or dicts (with str or int keys), lists and tuples of them.
        describe: returns what ``put_together`` needs to know of a leaf, JSON-able; None if a value is not a leaf.
        where: names the value in errors.

    Raises:
        UserError: it contains anything else, or is nested too deeply.
    """
    tree = Tree()
    try:
        tree.structure = _node(value, describe, where, (), tree)
    except RecursionError:
        raise UserError(f"{where} is nested too deeply, or holds itself", "return a flatter value") from None
    return tree


def put_together(arrays: Mapping[str, Array], leaf: Callable[[str, Any], Any], where: str) -> Any:
    """Rebuilds the value from the arrays of ``Tree.arrays``.

    Args:
        arrays: the arrays, by name.
        leaf: returns a leaf, given its name and its description.
        where: names the value in errors.

    Raises:
        UserError: the arrays do not describe a value.
    """
    integers = iter(arrays.get(INTEGERS, ()))
    floats = iter(arrays.get(FLOATS, ()))

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
        raise UserError(f"what was saved of {where} cannot be restored", "use another checkpoint") from error


def tree_tensors(name: str, value: Any, placement: Placement, leaves: Leaves, where: str) -> list[StateTensor]:
    """A nested value as named tensors: ``<name>/structure``, ``integers``, ``floats``, and one for each leaf.

    Raises UserError if it contains something that cannot be saved.
    """
    tree = take_apart(value, leaves.kind, where)
    tensors: list[StateTensor] = [
        ArrayTensor(f"{name}/{key}", padded(array), placement) for key, array in tree.arrays().items()
    ]
    return tensors + [leaves.tensor(f"{name}/{key}", leaf, placement) for key, leaf in tree.leaves.items()]


def tree_value(arrays: Mapping[str, Array], leaves: Leaves, where: str) -> Any:
    """Rebuilds what ``tree_tensors`` flattened, from arrays named without the ``<name>/`` prefix. Raises UserError."""
    return put_together(arrays, lambda name, kind: leaves.value(kind, arrays[name]), where)


def padded(array: Array) -> Array:
    """Pads JSON with blanks or numbers with zeros, which ``put_together`` ignores, to a power of two."""
    length = max(LEAST_ITEMS, 1 << (len(array) - 1).bit_length())
    filling = ord(" ") if array.dtype == np.uint8 else 0
    return np.pad(array, (0, length - len(array)), constant_values=filling)


def _leaf_name(path: tuple[str, ...], tree: Tree) -> str:
    """The path to a leaf joined by dots; a number if that is not a valid name or is taken."""
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
    if isinstance(value, int) and abs(value) < 2**256:  # a random generator's state: text of a fixed length
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
        "build it of dicts (keys: strings, whole numbers), lists, tuples, numbers, strings, bytes, tensors and arrays "
        "of numbers",
    )
