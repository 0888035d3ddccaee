"""Our Python processes: they import this installation, and nothing from the current folder.

``python -m`` and ``python -c`` put the current folder before the standard library, where a user's queue.py or json.py
would be run in its place; -P leaves it out.
"""

import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""The folder that holds the package."""
SEARCH_PATH = "PYTHONPATH"


def module(name: str, *words: str, interpreter: str | None = None) -> list[str]:
    """The command line that runs a module, by default with this process's interpreter."""
    return [interpreter or sys.executable, "-P", "-m", name, *words]


def code(text: str) -> list[str]:
    """The command line that runs Python statements."""
    return [sys.executable, "-P", "-c", text]


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment in which such a process finds this package, also if it is not installed but lies on a path."""
    folders = [folder for folder in environ.get(SEARCH_PATH, "").split(os.pathsep) if folder]
    # Before the standard library is not the place for everything that is installed; there it is found anyway.
    if ROOT not in (*folders, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        folders.insert(0, ROOT)
    given = {name: value for name, value in environ.items() if name != SEARCH_PATH}
    return given | ({SEARCH_PATH: os.pathsep.join(folders)} if folders else {})


def stay_findable() -> None:
    """For ``python -m hpctrain`` in a checkout that is not installed: processes that we start are to find it, too."""
    if _find(__name__.partition(".")[0], None) is None:
        os.environ[SEARCH_PATH] = environment()[SEARCH_PATH]


def spec_of(name: str) -> ModuleSpec | None:
    """A module of a dotted name in the current folder, or else on this process's path. Imports nothing."""
    top, *rest = name.split(".")
    spec = PathFinder.find_spec(top, [os.getcwd()]) or _find(top, None)
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = _find(f"{spec.name}.{part}", spec.submodule_search_locations)
    return spec


def version_of(*packages: str) -> str | None:
    """Of the first of these packages that is installed; imports none of them."""
    from importlib.metadata import PackageNotFoundError, version

    for package in packages:
        with suppress(PackageNotFoundError):
            return version(package)
    return None


def _find(name: str, places: Sequence[str] | None) -> ModuleSpec | None:
    return next((spec for finder in sys.meta_path if (spec := finder.find_spec(name, places))), None)
