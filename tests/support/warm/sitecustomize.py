"""On PYTHONPATH, turns ``hpctrain train``, ``evaluate`` and ``predict``, and ranks of benchmarks with PyTorch, into
stand-ins (see ../warm_ranks.py)."""

import os
import sys

COMMANDS = ("hpctrain train", "hpctrain evaluate", "hpctrain predict")
RANKS = {"benchmarks.gpu_proof.one_row", "benchmarks.step_ranks", "benchmarks.torch_parallel"}
words = sys.orig_argv[2:] if sys.orig_argv[1:2] == ["-P"] else sys.orig_argv[1:]
path = os.environ.get("WARM_RANKS", "").replace("%h", os.uname().nodename)
is_forked = words[:1] == ["-m"] and (" ".join(words[1:3]) in COMMANDS or not RANKS.isdisjoint(words[1:2]))
if path and is_forked and os.path.exists(path):
    from hpctrain.launch.forks.stand_in import main

    del os.environ["WARM_RANKS"]  # a stand-in that gets no answer becomes the rank
    main(path, *sys.orig_argv[1:])
