"""Command lines and environments for our Python processes, which import this installation, not the current folder.

``python -m`` and ``python -c`` put the current folder before the standard library, so that a user's queue.py or json.py
would shadow it; -P leaves the folder out.
"""

import atexit
import os
import sys
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from typing import NoReturn

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""The folder that holds the package."""
SEARCH_PATH = "PYTHONPATH"
THREAD_GRACE_S = 2.0
"""Longest wait for each thread that outlives a failed run."""


def module(name: str, *words: str, interpreter: str | None = None) -> list[str]:
    """Command line that runs a module, by default with this process's interpreter."""
    return [interpreter or sys.executable, "-P", "-m", name, *words]


def code(text: str) -> list[str]:
    """Command line that runs Python statements."""
    return [sys.executable, "-P", "-c", text]


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment in which such a process finds this package, even if it is not installed."""
    folders = [folder for folder in environ.get(SEARCH_PATH, "").split(os.pathsep) if folder]
    # Not for site-packages: it is searched anyway, and PYTHONPATH would put it before the standard library.
    if ROOT not in (*folders, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        folders.insert(0, ROOT)
    given = {name: value for name, value in environ.items() if name != SEARCH_PATH}
    return given | ({SEARCH_PATH: os.pathsep.join(folders)} if folders else {})


def stay_findable() -> None:
    """Makes processes that we start find the package when ``python -m hpctrain`` runs in an uninstalled checkout."""
    if _find(__name__.partition(".")[0], None) is None:
        os.environ[SEARCH_PATH] = environment()[SEARCH_PATH]


AT_ONCE = threading.Event()
"""Set if destructors at exit could wait without end."""


def leave(code: int) -> NoReturn:
    """Ends this process; after a failure without waiting for threads that the user's code has left behind."""
    others = [each for each in threading.enumerate() if each is not threading.main_thread() and not each.daemon]
    has_failed = code not in (0, 75)
    for each in others if has_failed or AT_ONCE.is_set() else ():
        each.join(THREAD_GRACE_S if has_failed else None)
    left = any(each.is_alive() for each in others) and has_failed
    if AT_ONCE.is_set() and not left:
        atexit._run_exitfuncs()
        mpi = sys.modules.get("mpi4py.MPI")  # which the interpreter would finalize after these, and after destructors
        if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.Finalize()
    if AT_ONCE.is_set() or left:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def spec_of(name: str) -> ModuleSpec | None:
    """Spec of a dotted module in the current folder, or else on this process's path. Imports nothing."""
    top, *rest = name.split(".")
    spec = PathFinder.find_spec(top, [os.getcwd()]) or _find(top, None)
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = _find(f"{spec.name}.{part}", spec.submodule_search_locations)
    return spec


def version_of(*packages: str) -> str | None:
    """Version of the first of these packages that is installed; imports none of them."""
    from importlib.metadata import PackageNotFoundError, version

    for package in packages:
        with suppress(PackageNotFoundError):
            return version(package)
    return None


def _find(name: str, places: Sequence[str] | None) -> ModuleSpec | None:
    return next((spec for finder in sys.meta_path if (spec := finder.find_spec(name, places))), None)
