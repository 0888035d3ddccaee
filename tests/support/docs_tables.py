"""Tables of the docs: ``python -m tests.support.docs_tables keys`` (configuration.md) or ``combinations``."""

from __future__ import annotations

import re
import sys

from hpctrain.config.combinations import is_key
from hpctrain.config.features import PLANS, TRAITS, Feature, Trait
from hpctrain.config.reference import keys, meanings
from hpctrain.config.refusals import keras_tasks, plans, sums, torch_tasks, training
from hpctrain.config.values import in_words

SUBJECTS = {
    "Gradient exchange, precision and local training": sums.ROWS,
    "Parallel plans": plans.ROWS,
    "Evaluation, schedules and data": training.ROWS,
    "PyTorch tasks": torch_tasks.ROWS,
    "Keras tasks": keras_tasks.ROWS,
}


def key_tables() -> str:
    """All keys of the run file as Markdown tables, one for each section, with an anchor for each key."""
    tables: dict[str, list[str]] = {}
    for (name, key), meaning in zip(keys().items(), meanings(), strict=True):
        default = "required" if key.default is None else f"`{key.default}`"
        section = name.partition(".")[0] if "." in name else "The run"
        anchored = f'<a id="{name}"></a>`{name}`'
        tables.setdefault(section, []).append(f"| {anchored} | {in_words(key.kind)} | {default} | {meaning} |\n")
    head = "| key | type | default | meaning |\n|---|---|---|---|\n"
    return "\n".join(f"## {section}\n\n{head}{''.join(rows)}" for section, rows in tables.items())


def combination_tables() -> str:
    """A Markdown table of refused combinations for each subject."""
    lines = []
    for subject, rows in SUBJECTS.items():
        lines += ["", f"## {subject}", "", "| feature | does not work with | instead |", "|---|---|---|"]
        shown_rows = ([*map(shown, features), escaped(fix)] for features, (_, fix) in rows.items())
        for first, *others, fix in sorted(shown_rows):
            lines.append(f"| {first} | {', and '.join(others)} | {fix} |")
    return "\n".join(lines[1:]) + "\n"


def shown(feature: Feature | Trait) -> str:
    """Returns a feature, as code if it is a key of the run file; for a trait, all features that have it."""
    if isinstance(feature, Trait):
        having = [one for one, own in TRAITS.items() if feature in own]
        named = (
            ["any plan of `parallel`"]
            if PLANS.keys() <= set(having)
            else [shown(one) for one in having if one in PLANS]
        )
        *most, last = [*named, *(shown(one) for one in having if one not in PLANS)]
        return f"{', '.join(most)} or {last}" if most else last
    return f"`{feature}`" if is_key(feature) else escaped(feature)


def escaped(text: str) -> str:
    """Escapes characters that Markdown would interpret."""
    return re.sub(r"([\[\]*_`|])", r"\\\1", text)


if __name__ == "__main__":
    print({"keys": key_tables, "combinations": combination_tables}[sys.argv[1]](), end="")
