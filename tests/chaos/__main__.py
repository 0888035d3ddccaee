"""The command line of the package."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.chaos.faults import PLANS, chaos
from tests.support.netns import NotPermitted


def main() -> int:
    """Run each plan with ``--faults`` faults; return 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=10, help="of each plan")
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--cold", action="store_true", help="start each rank without a fork, as users do")
    args = parser.parse_args()
    failed = False
    for plan in args.plans.split(","):
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            try:
                wrong = chaos(Path(folder), plan, args.seed, args.faults, not args.cold)
            except NotPermitted as error:
                print(f"{plan}: {error}", flush=True)
                continue
        failed |= bool(wrong)
        print(f"{plan}: {args.faults} faults, seed {args.seed}: {'; '.join(wrong) or 'as without them'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
