"""On PYTHONPATH: ``hpctrain train`` and its like become stand-ins, see ../warm_ranks.py; nothing else changes."""

import os
import sys

COMMANDS = ("train", "evaluate", "predict")
words = sys.orig_argv[2:] if sys.orig_argv[1:2] == ["-P"] else sys.orig_argv[1:]
if "WARM_RANKS" in os.environ and words[:2] == ["-m", "hpctrain"] and [*words, ""][2] in COMMANDS:
    import stand_in  # type: ignore[import-not-found]  # its folder is on the path by then

    stand_in.main(os.environ["WARM_RANKS"], *sys.orig_argv[1:])
