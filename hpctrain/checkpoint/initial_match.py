"""Matches a source's weights with a model's by mapped names and shapes; a partial match must be requested."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TypeVar

from hpctrain.backends.named_state import endings, plain_name
from hpctrain.comm.group import Group
from hpctrain.errors import UserError

T = TypeVar("T")
SHOWN = 5
"""Number of names listed in a message; events hold all."""


@dataclass(frozen=True)
class WeightSource:
    """Where initial weights come from and how names map; see ``checkpoint.init_...`` in the run file."""

    path: str
    """Run folder, checkpoint folder, folder of Hugging Face or torch.distributed.checkpoint, or file."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """Name prefixes in the source and their replacements in the model; the longest matching prefix applies."""
    missing: Sequence[str] = ()
    """Patterns of the model's weights that the source may lack or have in a different shape."""


@dataclass(frozen=True)
class Match:
    """The result of matching weights, by name without ``model/``."""

    taken: tuple[str, ...]
    missing: tuple[str, ...]
    """Only in the model; these keep their initial values."""
    unexpected: tuple[str, ...]
    """Only in the source; ignored."""
    reshaped: tuple[str, ...]
    """In both, with different shapes; these keep their initial values."""


def match_names(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> Match:
    """Compare two sets of shapes by name."""
    both = [name for name in wanted if name in found]
    return Match(
        taken=tuple(name for name in both if wanted[name] == found[name]),
        missing=tuple(name for name in wanted if name not in found),
        unexpected=tuple(name for name in found if name not in wanted),
        reshaped=tuple(name for name in both if wanted[name] != found[name]),
    )


def of_stages(own: Mapping[str, tuple[int, ...]], stages: Group) -> dict[str, tuple[int, ...]]:
    """Gather the shapes of a model's weights from its pipeline stages, by name. Collective."""
    each = stages.allgather({name: list(shape) for name, shape in own.items()}, "list the weights of the model")
    return {name: tuple(shape) for one in each for name, shape in one.items()}


def renamed(weights: Mapping[str, T], rename: Mapping[str, str], what: str) -> dict[str, T]:
    """Rename weights to the model's names, and remove the parts that torch.compile adds.

    Args:
        weights: weights by name.
        rename: name prefixes and their replacements; the longest matching prefix applies.
        what: where the weights come from, for errors.

    Raises:
        UserError: a prefix matches no name, or two weights get the same name.
    """
    beginnings = sorted(rename, key=len, reverse=True)
    result: dict[str, T] = {}
    used = set()
    for name, value in weights.items():
        plain = plain_name(name)
        beginning = next((one for one in beginnings if plain.startswith(one)), None)
        if beginning is not None:
            used.add(beginning)
            plain = rename[beginning] + plain.removeprefix(beginning)
        if plain in result:
            raise UserError(f"two weights of {what} would be called {plain}", "map their prefixes to different ones")
        result[plain] = value
    idle = [beginning for beginning in beginnings if beginning not in used]
    if idle:
        fix = f"its names are {first_names(list(weights))}"
        raise UserError(f"no weight of {what} has a name that begins with {idle[0]!r}", fix)
    return result


def require_meant(
    source: WeightSource, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> Match:
    """Match the weights, and require that every partial match is requested.

    Raises:
        UserError: no weight matches, or the source lacks weights of the model or has them in a different shape, and
            ``source.missing`` does not list them.
    """
    match = match_names(wanted, found)
    hint = "" if source.rename else guessed_rename(match.missing, match.unexpected)
    if not match.taken:
        raise UserError(
            f"no weight of {source.path} has the name and shape of one of the model "
            f"(it has {first_names(list(found))}; the model has {first_names(list(wanted))})",
            f"{hint or 'map names by checkpoint.init_rename'}, or set checkpoint.init_from to weights of this model",
        )
    problems: list[str] = []
    left: list[str] = []
    for kind, names in (("are missing", match.missing), ("have another shape", match.reshaped)):
        unmeant = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in source.missing)]
        if unmeant:
            problems.append(f"{len(unmeant)} {kind} ({first_names(unmeant)})")
            left += unmeant
    if problems:
        patterns = guessed_patterns(left)
        keep = f"if these are to keep their initial values, set checkpoint.init_missing: [{', '.join(patterns)}]"
        also = f"; not used: {first_names(match.unexpected)}" if match.unexpected else ""
        fix = f"{hint}, or, {keep}" if hint else keep
        raise UserError(f"{source.path} does not have all weights of the model: {' and '.join(problems)}{also}", fix)
    return match


def guessed_rename(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Advice on the prefix mapping that would match the most missing names; empty if there is none."""
    by_ending: dict[str, str] = {}
    for other in unexpected:
        for ending in endings(other):
            by_ending.setdefault(ending, other)
    votes: Counter[tuple[str, str]] = Counter()
    for name in missing:
        common = next((one for one in endings(name) if one in by_ending), None)
        if common is not None and ("." in common or common in (name, by_ending[common])):
            votes[by_ending[common].removesuffix(common), name.removesuffix(common)] += 1
    if not votes:
        return ""
    (old, new), _ = votes.most_common(1)[0]
    return f'set checkpoint.init_rename: {{"{old}": "{new}"}}'


def guessed_patterns(names: Iterable[str]) -> list[str]:
    """Quoted patterns made from the first component of each name."""
    return list(dict.fromkeys(f'"{name.split(".")[0]}.*"' if "." in name else f'"{name}"' for name in names))


def first_names(names: Sequence[str]) -> str:
    """The first names, and the number of the rest."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
