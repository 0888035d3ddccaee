"""Nested values, such as a ``state_dict`` gives them, as flat arrays and a text that says how they belong together.

The text depends on the structure only, not on the numbers in it: from save to save the arrays keep their shapes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import UserError

STRUCTURE, INTEGERS, FLOATS = "structure", "integers", "floats"


@dataclass
class Tree:
    """A nested value, taken apart."""

    structure: Any = None
    """JSON: a value is a list of its kind and its content."""
    integers: list[int] = field(default_factory=list)
    """Whole numbers and truth values."""
    floats: list[float] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)
    """What the caller can store: arrays, tensors."""

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
    tree.structure = _node(value, describe, where, tree)
    return tree


def put_together(arrays: Mapping[str, NDArray[Any]], leaf: Callable[[str, Any], Any], where: str) -> Any:
    """The value, from what ``Tree.arrays`` gave.

    Args:
        arrays: by name.
        leaf: gives a leaf by its number, as text, and its description.
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


def _node(value: Any, describe: Callable[[Any], Any], where: str, tree: Tree) -> list[Any]:
    description = describe(value)
    if description is not None:
        tree.leaves.append(value)
        return ["leaf", [str(len(tree.leaves) - 1), description]]
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
        items = [_node(item, describe, f"{where}, {number}", tree) for number, item in enumerate(value)]
        return ["list" if isinstance(value, list) else "tuple", items]
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        return ["dict", [[key, _node(item, describe, f"{where}, {key}", tree)] for key, item in value.items()]]
    raise UserError(
        f"{where} is a {type(value).__name__}, which cannot be saved",
        "build it of dicts, lists, tuples, numbers, strings and tensors",
    )
