"""``python -m hpctrain.launch.tether program arguments``: runs a program that dies with the process that started it."""

from __future__ import annotations

import os
import sys

from hpctrain.launch.processes import die_with_parent


def main() -> None:
    """Replaces this process by the program."""
    die_with_parent()
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        sys.exit(f"hpctrain: cannot run {sys.argv[1]}: {error.strerror}\n  fix: correct launch.command")


if __name__ == "__main__":
    main()
