"""How a model of Hugging Face says that its layers are split, for tasks without ``tensor=``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from inspect import getattr_static
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
    own = {name: getattr_static(module, "_tp_plan", None) for name, module in named.items()}  # PEFT's model forwards
    plans = {name: plan for name, plan in own.items() if plan and isinstance(plan, Mapping)}
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

    cuts: dict[str, LayerCut] = {}
    for pattern, cut in found.items():
        adapted = [one for one in named if one.endswith(".base_layer") and fnmatchcase(one, f"{pattern}.base_layer")]
        for base in adapted:
            cuts |= dict.fromkeys([base, *adapters_of(base.removesuffix(".base_layer"), cut, named)], cut)
        plain = [one for one in named if fnmatchcase(one, pattern) and f"{one}.base_layer" not in adapted]
        if not adapted or plain:
            cuts |= dict.fromkeys(plain if adapted else [pattern], cut)
    return {pattern: cut for pattern, cut in cuts.items() if not is_tied(pattern)}


ADAPTERS = {"columns": "lora_B", "rows": "lora_A"}
"""Matrices of PEFT's LoRA that are split like the layer they adapt: B has its outputs, A its inputs."""


def adapters_of(layer: str, cut: LayerCut, named: Mapping[str, Any]) -> list[str]:
    """Names of the adapters' matrices that are split with a layer."""
    inner = f"{layer}.{ADAPTERS.get(cut.kind)}"
    return [f"{inner}.{adapter}" for adapter in (named[inner]._modules if inner in named else ())]
