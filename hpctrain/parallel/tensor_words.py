"""The words with which a task says how its layers are split over a tensor group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hpctrain.errors import UserError


@dataclass(frozen=True)
class LayerCut:
    """How a layer is split: by ``columns``, ``rows`` or ``vocabulary``."""

    kind: Literal["columns", "rows", "vocabulary"]
    parts: int = 1
    """Number of equal parts of the outputs, each split separately: 3 for queries, keys and values in one layer."""
    heads: int | None = None
    """Number of heads per part of the outputs, none of which is split; None if any split will do."""
    gathers: bool = False
    """Whether each rank gets the outputs of all ranks."""
    classes: bool = False
    """Whether outputs are logits for ``hpctrain.cross_entropy``."""


@dataclass(frozen=True)
class Columns(LayerCut):
    """The type of ``columns``, which can be used as it is or called with options."""

    kind: Literal["columns", "rows", "vocabulary"] = "columns"

    def __call__(
        self, parts: int = 1, heads: int | None = None, gathers: bool = False, classes: bool = False
    ) -> Columns:
        """Splits a layer by outputs.

        Args:
            parts: equal parts of the outputs, each split separately: 3 for queries, keys and values in one layer.
            heads: number of heads per part, none of which is split.
            gathers: each rank gets the outputs of all ranks, as most losses need for the last layer.
            classes: the outputs are logits, each rank keeps those of its classes, and the loss is computed by
                ``hpctrain.cross_entropy``. In evaluations and predictions they are gathered.

        Raises:
            UserError: outputs in several parts cannot be gathered or be classes, or a number is not positive.
        """
        if parts < 1 or (heads is not None and heads < 1):
            raise UserError(f"columns(parts={parts}, heads={heads}) is not a possible split", "give positive numbers")
        if gathers and parts > 1:
            fix = "leave gathers=True out, and let a layer with `rows` follow; or give each part a separate layer"
            raise UserError(f"columns(parts={parts}, gathers=True) would mix the parts", fix)
        if classes and (gathers or parts > 1):
            fix = "write columns(classes=True) for a loss by hpctrain.cross_entropy, columns(gathers=True) for others"
            raise UserError(f"columns(parts={parts}, gathers={gathers}, classes=True) contradicts itself", fix)
        return replace(self, parts=parts, heads=heads, gathers=gathers, classes=classes)


@dataclass(frozen=True)
class Rows(LayerCut):
    """The type of ``rows``, which can be used as it is or called."""

    kind: Literal["columns", "rows", "vocabulary"] = "rows"

    def __call__(self) -> Rows:
        """Returns itself."""
        return self


columns = Columns()
"""For ``torch.nn.Linear``: each rank computes some of the outputs from the whole input."""
rows = Rows()
"""For ``torch.nn.Linear``: each rank has some of the inputs, left to it by a layer with ``columns``; the outputs are
summed over the ranks, and all ranks get them."""
vocabulary = LayerCut("vocabulary")
"""For ``torch.nn.Embedding``: each rank has some of the table's rows, and all ranks get all vectors. With
``parallel.shard: tables``, also for ``torch.nn.EmbeddingBag``: ranks see different samples, and get their vectors."""
ColwiseParallel = columns
"""``columns`` under DTensor's name; ``ColwiseParallel()`` is the same."""
RowwiseParallel = rows
"""``rows`` under DTensor's name; ``RowwiseParallel()`` is the same."""
