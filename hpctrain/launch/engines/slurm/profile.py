"""Site profiles: a centre's settings for all jobs, in TOML with the keys of the run file's ``launch`` section.

Layers, each overriding the one before: the built-in ``generic``; variables of sbatch (``OF_SITE``); the profile that
the run file names; the site's ``~/.config/hpctrain/site.toml``; the run file; the command line. Single values replace,
lists add up, mappings merge.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import tomllib
import typing
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path

from hpctrain.config.sections import LaunchConfig, SlurmConfig
from hpctrain.config.values import Misfit, converted, to_give
from hpctrain.errors import UserError
from hpctrain.launch.engines.slurm import FILES
from hpctrain.system import safe_read

MOST_BYTES = 256 << 10
"""Maximum size of a profile."""
APPLIED = "none"
"""Profile name for no profile, also set once profiles have been applied."""

REPLACED = {"slurm.wrap", "stage_in"}
"""Lists that are a single value: a later layer replaces them."""

OF_SITE = {f"SBATCH_{name.upper()}": name for name in ("account", "partition", "qos", "reservation", "constraint")}
"""Variables that sites set for their users, with the field of ``launch.slurm`` that they fill. All others of sbatch,
which would take precedence over the script, are ignored."""

ABOUT = ("description", "verified")
"""Keys that describe a profile."""
SLURM = "slurm."
Layer = Mapping[str, typing.Any]
"""Values of ``launch`` by dotted keys, such as ``slurm.account``; lists as tuples."""


def site_dir() -> Path:
    """Returns the site's or user's folder: $HPCTRAIN_SITE, else hpctrain in $XDG_CONFIG_HOME or ~/.config."""
    if named := os.environ.get("HPCTRAIN_SITE"):
        return Path(named)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "hpctrain"


def resolve(launch: LaunchConfig, site: Path | None = None) -> LaunchConfig:
    """Applies all profiles that the configuration uses."""
    if launch.slurm.profile == APPLIED:
        return launch
    return apply(launch, layers(launch.slurm.profile, site or site_dir()))


def layers(name: str, site: Path) -> list[Layer]:
    """Returns the profiles below a run file that names this one, lowest first."""
    given = {SLURM + name: os.environ[variable] for variable, name in OF_SITE.items() if os.environ.get(variable)}
    found: list[Layer] = [read(FILES / "profiles" / "generic.toml"), given]
    if name != "generic":
        found.append(read(find(name, site)))
    if (site / "site.toml").is_file():
        found.append(read(site / "site.toml"))
    return found


def find(name: str, site: Path) -> Path:
    """Returns the file of a profile given by path or name; the site's come before built-in ones. Raises UserError."""
    if name.endswith(".toml"):
        return Path(name)
    folders = [site / "profiles", FILES / "profiles"]
    for folder in folders:
        if (folder / f"{name}.toml").is_file():
            return folder / f"{name}.toml"
    known = sorted({path.stem for folder in folders if folder.is_dir() for path in folder.glob("*.toml")})
    near = difflib.get_close_matches(name, known, n=1)
    fix = f"did you mean {near[0]}?" if near else f"name one of {', '.join(known)}, or write one to {folders[0]}"
    raise UserError(f"there is no Slurm profile {name!r}", fix)


def read(path: Path) -> Layer:
    """Reads and checks a profile. Raises UserError."""
    try:
        raw = tomllib.loads(safe_read.read(path, MOST_BYTES).decode())
    except OSError as error:
        raise UserError(f"profile {path} cannot be read: {error.strerror}", "give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"profile {path} is not TOML: {error}", "correct the line") from error
    launch = _table(raw.pop("launch", {}), f"{path}: launch")
    slurm = _table(launch.pop("slurm", {}), f"{path}: launch.slurm")
    if extra := sorted({*raw} - {*ABOUT}):
        raise UserError(f"{path} has the key {extra[0]!r}", "put everything under [launch] and [launch.slurm]")
    given = launch | {SLURM + key: value for key, value in slurm.items()}
    return {key: _value(key, value, path) for key, value in given.items()}


def apply(launch: LaunchConfig, profiles: Sequence[Layer]) -> LaunchConfig:
    """Returns the configuration on top of the layers, of which later ones override earlier ones."""
    merged: Layer = {}
    for layer in (*profiles, _given(launch)):
        merged = _over(merged, layer)
    slurm = {key.removeprefix(SLURM): value for key, value in merged.items() if key.startswith(SLURM)}
    outer = {key: value for key, value in merged.items() if not key.startswith(SLURM)}
    return dataclasses.replace(launch, **outer, slurm=dataclasses.replace(launch.slurm, **slurm, profile=APPLIED))


def _given(launch: LaunchConfig) -> Layer:
    """Returns what the user set: what is neither empty nor ``auto``."""
    values = {key: attrgetter(key)(launch) for key in settable()}
    return {key: value for key, value in values.items() if value not in (None, (), {}, "auto")}


def _over(below: Layer, above: Layer) -> Layer:
    """Merges two layers; ``above`` overrides ``below``."""
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, tuple) and key not in REPLACED:
            value = (*below.get(key, ()), *value)
        elif isinstance(value, dict):
            value = {**below.get(key, {}), **value}
        merged[key] = value
    return merged


@functools.cache
def settable() -> Layer:
    """Returns the keys that a profile may set, with their types: those that are empty or ``auto`` by default."""
    return {
        prefix + entry.name: typing.get_type_hints(section)[entry.name]
        for prefix, section in (("", LaunchConfig), (SLURM, SlurmConfig))
        for entry in dataclasses.fields(section)
        if entry.default in (None, (), "auto") or entry.default_factory is dict
    }


def _table(value: typing.Any, place: str) -> dict[str, typing.Any]:
    if not isinstance(value, dict):
        raise UserError(f"{place} is not a table", "write [launch] and [launch.slurm]")
    return value


def _value(key: str, value: typing.Any, path: Path) -> typing.Any:
    """Converts a value to its key's type. Raises UserError if it does not fit, or a profile cannot set the key."""
    place = f"{path}: launch.{key}"
    if key not in settable():
        section, _, name = key.rpartition(".")
        names = [one.rpartition(".")[2] for one in settable() if one.rpartition(".")[0] == section]
        near = difflib.get_close_matches(name, names, n=1)
        fix = f"did you mean {near[0]}?" if near else f"use {', '.join(names)}"
        raise UserError(f"{place} is not something that a profile can set", fix)
    kind = settable()[key]
    try:
        return converted(value, kind)
    except Misfit as misfit:
        raise UserError(f"{place} cannot be {misfit.value!r}", f"give {to_give(kind)}") from misfit
