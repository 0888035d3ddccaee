"""``env/gpu-proof``: runs the rows and writes gpu-proof.json and gpu-proof.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.gpu_proof import wheels


def main() -> int:
    """Runs the command; returns an exit code, 1 if a row failed."""
    args = arguments()
    if args.pack:
        return wheels.pack(args.pack, args.python_version, args.platform)
    if args.wheels:
        wheels.enter(args.wheels, args.output / "venv", sys.argv[1:])
    from benchmarks.gpu_proof.proof import prove  # imports packages that ``enter`` may have to install

    return prove(args.rows, args.output, args.minutes)


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="env/gpu-proof", description="Is hpctrain right on this GPU, and how fast?")
    parser.add_argument("rows", nargs="*", default=["*"], metavar="ROW", help="patterns of rows (default: all)")
    parser.add_argument("--output", type=Path, default=Path("build/gpu-proof"), help="folder (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=8.5, help="longest time of all rows (default: %(default)s)")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="install from there what this Python lacks")
    parser.add_argument(
        "--pack", type=Path, metavar="DIR", help="fetch these wheels, where there is a network, and end"
    )
    parser.add_argument("--python-version", default=f"{sys.version_info[0]}.{sys.version_info[1]}", help="of --pack")
    parser.add_argument("--platform", default="manylinux_2_28_x86_64", help="of --pack (default: %(default)s)")
    args = parser.parse_args()
    for name in ("output", "wheels", "pack"):
        if folder := getattr(args, name):
            setattr(args, name, folder.resolve())
    args.output.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    sys.exit(main())
