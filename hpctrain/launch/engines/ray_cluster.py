"""Ranks on a Ray cluster: an actor on each node that the run needs runs `hpctrain node`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hpctrain.config.sections import Config
from hpctrain.errors import RunFailed, UserError, requires
from hpctrain.launch.engines import fitting, runners
from hpctrain.launch.runners import ticket
from hpctrain.system.address import require_answer

STARTS = "ray start --head, or set RAY_ADDRESS"
LEAVING_S = 10.0
"""Longest wait for nodes to leave after the run."""


class RayNode:
    """The actor that runs on a node."""

    def serve(self, given: ticket.Ticket) -> int:
        """See ``runners.serve``."""
        return runners.serve(given)


def fit(
    config: Config | Mapping[str, Any] | str | Path,
    *,
    placement: Literal["spread", "packed"] = "spread",
    fresh: bool = False,
    report: fitting.Report | None = None,
) -> fitting.RunResult:
    """Trains on this program's Ray cluster and waits for the end. Can be called in a trainable of Ray Tune.

    The cluster is the one that ``ray.init`` has connected to, else the one named by RAY_ADDRESS, else the one that this
    machine belongs to. All nodes must see the run folder and the Python environment under the same paths.

    Args:
        config: a Config from ``load_config``, the path of a run file, or a dict with the content of one. It sets the
            number of nodes (``launch.nodes``) and of ranks on each (``launch.ranks_per_node``).
        placement: ``spread`` puts each node of the run on a different Ray node, ``packed`` all ranks on one.
        fresh: put existing checkpoints aside and start from the beginning.
        report: called with the metrics of each evaluation and its ``step``, such as ``ray.tune.report``. If it raises,
            the run stops with a checkpoint.

    Raises:
        UserError: something must be corrected first, Ray is missing, or there is no cluster.
        NoRequeue: another attempt is pointless.
        RunFailed: the run failed otherwise, or the cluster had no room within ``launch.node_wait_s``.
    """
    config = fitting.read(config)
    if placement == "packed":
        launch = config.launch
        ranks = launch.nodes * (launch.ranks_per_node or 1)
        packed = dataclasses.replace(launch, nodes=1, min_nodes=None, spare_nodes=0, ranks_per_node=ranks)
        config = dataclasses.replace(config, launch=packed)
    return fitting.fit(config, invited, fresh, report)


@contextlib.contextmanager
def invited(config: Config, made: ticket.Ticket) -> Iterator[Callable[[], str]]:
    """See ``runners.Invite``. Reserves on each node a core per rank and thread, and launch.slurm.gpus_per_node GPUs.

    Raises:
        UserError: Ray is missing, or there is no cluster.
        RunFailed: the cluster has no room within ``launch.node_wait_s``.
    """
    with requires("ray", "ray"):
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        if not ray.is_initialized():
            if re.fullmatch(r"[^/]+:\d+", address):  # Ray itself would try for minutes
                require_answer("launch.engine is ray: the cluster of RAY_ADDRESS", [address], STARTS)
            ray.init(address=address, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(f"launch.engine is ray: {error}", STARTS) from error
    launch = config.launch
    gpus = launch.slurm.gpus_per_node or 0
    cores = (launch.ranks_per_node or gpus or 1) * (config.train.threads or 1)
    bundle = {"CPU": cores} | ({"GPU": gpus} if gpus else {})
    group = placement_group([bundle] * (launch.nodes + launch.spare_nodes), strategy="STRICT_SPREAD")
    actors: list[Any] = []
    try:
        if not group.wait(launch.node_wait_s):
            what = f"Ray did not have {group.bundle_count} nodes with {bundle} within {launch.node_wait_s:g} s"
            raise RunFailed(what, "see `ray status`, and request less")
        for index in range(group.bundle_count):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            made_there: Any = ray.remote(RayNode).options(num_cpus=cores, num_gpus=gpus, scheduling_strategy=place)
            actors.append(made_there.remote())
        serving = [actor.serve.remote(made) for actor in actors]
        yield partial(_problem, serving)
        ray.wait(serving, num_returns=len(serving), timeout=LEAVING_S)
    finally:
        remove_placement_group(group)


def _problem(serving: Sequence[Any]) -> str:
    import ray

    for ended in ray.wait(list(serving), num_returns=len(serving), timeout=0)[0]:
        try:
            return f"hpctrain node has ended on one with exit code {ray.get(ended)}"
        except ray.exceptions.RayError as error:
            return (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return ""
