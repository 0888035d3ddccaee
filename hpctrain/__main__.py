"""``python -m hpctrain``, and the program ``hpctrain``."""

import os
import sys


def leave_current_folder() -> None:
    """Drops empty entries of PYTHONPATH, which Python takes for the current folder, before anything else is imported.

    They come from ``PYTHONPATH=/some/folder:$PYTHONPATH`` if it was not set. Tasks are still found there.
    """
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    named = [folder for folder in given if folder]
    if given == [""] or named == given:
        return
    os.environ["PYTHONPATH"] = os.pathsep.join(named)
    if os.getcwd() not in map(os.path.abspath, named):
        sys.path[:] = [folder for folder in sys.path if folder not in ("", os.getcwd())]


leave_current_folder()

from hpctrain import cli  # noqa: E402
from hpctrain.system import python  # noqa: E402


def main() -> None:
    """Runs a command, and ends this process with its exit code."""
    python.leave(cli.main())


if __name__ == "__main__":
    python.stay_findable()
    main()
