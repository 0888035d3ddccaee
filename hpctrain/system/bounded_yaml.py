"""A YAML parser that bounds alias expansion and yields plain values only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

MOST_BYTES = 256 << 10
"""Largest text; PyYAML takes 4 s for it without libyaml."""
MOST_EXPANDED = 4 << 20
"""Largest size in characters after all aliases are expanded, counting VALUE extra for each value."""
VALUE = 8
DEEPEST = 64
"""Deepest nesting of lists and mappings, including through aliases."""
MOST_DIGITS = 100
"""Most digits of an integer."""
NOT_PLAIN = ("binary", "timestamp", "omap", "pairs", "set")
"""YAML tags of values that JSON does not have."""


if TYPE_CHECKING or not yaml.__with_libyaml__:
    Loader = yaml.SafeLoader
else:

    class Loader(yaml.composer.Composer, yaml.CSafeLoader):
        """SafeLoader that takes its events from libyaml, which is eight times as fast; Python composes them."""

        def __init__(self, stream: str) -> None:
            yaml.CSafeLoader.__init__(self, stream)
            yaml.composer.Composer.__init__(self)


class BoundedLoader(Loader):
    """SafeLoader that raises a MarkedYAMLError for texts whose values would exceed the bounds above."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._measured: dict[int, tuple[int, int]] = {}
        """Expanded characters and levels by id of the node; nodes live as long as the loader."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = self.peek_event().start_mark
        is_alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > DEEPEST:
            raise yaml.composer.ComposerError(None, None, f"it nests deeper than {DEEPEST} levels", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        if is_alias and id(node) not in self._measured:
            raise yaml.composer.ComposerError(None, None, "an alias stands for what it is part of", mark)
        expanded, levels = self._measured[id(node)] if is_alias else self._measure(node)
        self._measured[id(node)] = expanded, levels
        if expanded > MOST_EXPANDED or levels > DEEPEST:
            raise yaml.composer.ComposerError(None, None, "its aliases multiply to too much", mark)
        return node

    def _measure(self, node: yaml.Node) -> tuple[int, int]:
        if isinstance(node, yaml.ScalarNode):
            return VALUE + len(node.value), 1
        inner = list(node.value)
        if isinstance(node, yaml.MappingNode):
            inner = [each for pair in node.value for each in pair]
        measured = [self._measured[id(each)] for each in inner]
        return VALUE + sum(size for size, _ in measured), 1 + max((levels for _, levels in measured), default=0)

    def construct_whole(self, node: yaml.Node) -> int:
        """Constructs an integer; refuses ones so long that Python would not convert them back to text."""
        if len(node.value) > MOST_DIGITS:
            what = f"the number has more than {MOST_DIGITS} digits"
            raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)
        assert isinstance(node, yaml.ScalarNode)
        return int(self.construct_yaml_int(node))


def _refuse(loader: BoundedLoader, node: yaml.Node) -> Any:
    raise yaml.constructor.ConstructorError(None, None, f"values of {node.tag} are not allowed here", node.start_mark)


BoundedLoader.add_constructor("tag:yaml.org,2002:int", BoundedLoader.construct_whole)
for _tag in NOT_PLAIN:
    BoundedLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _refuse)


def parse(text: str, loader: type[BoundedLoader] = BoundedLoader) -> Any:
    """Parses a YAML text to plain values. Raises yaml.YAMLError, also for a tag that does not fit its value."""
    try:
        return yaml.load(text, Loader=loader)  # noqa: S506 (derived from SafeLoader)
    except (ValueError, TypeError, KeyError) as error:
        raise yaml.constructor.ConstructorError(None, None, f"a tag does not fit its value ({error})", None) from error
