"""The words by which a task says how its layers are cut over the ranks of a tensor group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hpctrain.errors import UserError


@dataclass(frozen=True)
class LayerCut:
    """How a layer is cut: ``columns``, ``rows`` or ``vocabulary``."""

    kind: Literal["columns", "rows", "vocabulary"]
    parts: int = 1
    """Equal parts of the outputs, each of which is cut by itself: 3 for queries, keys and values in one layer."""
    heads: int | None = None
    """What must stay whole: that number of heads makes up a part of the outputs. None if any cut will do."""
    gathers: bool = False
    """Whether each rank gets the outputs of all."""
    classes: bool = False
    """Whether outputs are logits for ``hpctrain.cross_entropy``."""


@dataclass(frozen=True)
class Columns(LayerCut):
    """``columns``, by itself or called with options."""

    kind: Literal["columns", "rows", "vocabulary"] = "columns"

    def __call__(
        self, parts: int = 1, heads: int | None = None, gathers: bool = False, classes: bool = False
    ) -> Columns:
        """A cut by outputs.

        Args:
            parts: equal parts of the outputs, each of which is cut by itself: 3 for queries, keys and values together.
            heads: this number of heads makes up a part, and none is cut.
            gathers: each rank gets the outputs of all, as most losses need those of the last layer.
            classes: the outputs are logits, each rank keeps those of its classes, and the loss is made by
                ``hpctrain.cross_entropy``. In evaluations and predictions they are gathered.

        Raises:
            UserError: outputs in several parts cannot be gathered or be classes, or a number is not positive.
        """
        if parts < 1 or (heads is not None and heads < 1):
            raise UserError(f"columns(parts={parts}, heads={heads}) is not a cut", "give positive numbers")
        if gathers and parts > 1:
            fix = "leave gathers=True out, and let a layer with `rows` follow; or give each part a separate layer"
            raise UserError(f"columns(parts={parts}, gathers=True) would mix the parts", fix)
        if classes and (gathers or parts > 1):
            fix = "write columns(classes=True) for a loss by hpctrain.cross_entropy, columns(gathers=True) for others"
            raise UserError(f"columns(parts={parts}, gathers={gathers}, classes=True) contradicts itself", fix)
        return replace(self, parts=parts, heads=heads, gathers=gathers, classes=classes)


@dataclass(frozen=True)
class Rows(LayerCut):
    """``rows``, by itself or called."""

    kind: Literal["columns", "rows", "vocabulary"] = "rows"

    def __call__(self) -> Rows:
        """The same."""
        return self


columns = Columns()
"""Of a ``torch.nn.Linear``: each rank computes some of the outputs, of whole inputs."""
rows = Rows()
"""Of a ``torch.nn.Linear``: each rank has some of the inputs, which a layer with ``columns`` left it; the sum over the
ranks is the output, on all of them."""
vocabulary = LayerCut("vocabulary")
"""Of a ``torch.nn.Embedding``: each rank has some of the rows of the table, and all get the vectors of all. With
``parallel.shard: tables``, also of a ``torch.nn.EmbeddingBag``: ranks see different samples, and get theirs."""
ColwiseParallel = columns
"""``columns`` under the name that DTensor has for it; ``ColwiseParallel()`` is the same."""
RowwiseParallel = rows
"""``rows`` under the name that DTensor has for it; ``RowwiseParallel()`` is the same."""
