"""How a model of Hugging Face says that its layers are split, for tasks without ``tensor=``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from hpctrain.tasks.definition import LayerCut, columns, rows, vocabulary

STYLES: Mapping[str, LayerCut] = {
    "colwise": columns,
    "colwise_gather_output": columns(gathers=True),
    "colwise_rep": columns(gathers=True),
    "rowwise": rows,
    "embedding_rowwise": vocabulary,
}
"""The styles of ``transformers`` that have a counterpart; ``colwise_rep`` is the older name."""


def cuts_of(model: Any) -> dict[str, LayerCut]:
    """The plan (``_tp_plan``) of a model, or of the outermost module inside it that has one, by patterns of layers.

    Empty if there is none, or if it has a style without counterpart. A layer that shares its weight with one that the
    plan leaves whole stays whole, too: heads that are tied to an embedding.
    """
    named = dict(model.named_modules()) if hasattr(model, "named_modules") else {}
    plans = {name: plan for name, module in named.items() if (plan := getattr(module, "_tp_plan", None))}
    if not plans:
        return {}
    name, plan = next(iter(plans.items()))
    if not STYLES.keys() >= set(plan.values()):
        return {}
    uses = Counter(id(one) for module in named.values() for one in module._parameters.values())
    found = {f"{name}.{pattern}".lstrip("."): STYLES[style] for pattern, style in plan.items()}

    def is_tied(pattern: str) -> bool:
        layer = named.get(pattern)
        return layer is not None and uses[id(layer._parameters.get("weight"))] > 1

    return {pattern: cut for pattern, cut in found.items() if not is_tied(pattern)}
