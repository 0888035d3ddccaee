"""What a run's checkpoints contain: state of the framework and of other objects, and what a resume must know of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from hpctrain.checkpoint.format.durable_files import crc32
from hpctrain.checkpoint.format.layout import ITEM_TYPES
from hpctrain.checkpoint.frozen import FROZEN, FrozenRecord, LeftOut, is_common
from hpctrain.checkpoint.object_state import OBJECTS, require_equal, state_of
from hpctrain.checkpoint.resume_compat import config_hash
from hpctrain.comm.group import Group
from hpctrain.errors import RunFailed
from hpctrain.run.attempts import versions
from hpctrain.train.hooks import Training
from hpctrain.train.state import Placement, StateTensor
from hpctrain.train.stateful import Kept

UNDECLARED = (
    "warning: checkpoints leave out what changes here: {}; if it is state, give its owner state_dict and "
    "load_state_dict, and list the owner in the task's state={{...}}"
)
MOST_NAMED = 5
"""Limit on the names listed in UNDECLARED."""
FIRST_STEPS = 2
"""Number of first steps after which the state is listed without a save, so that the layout is ready for the first save
and undeclared state is reported early. The task's own state is compared between ranks at these steps too."""


class Contents:
    """The contents of a run's checkpoints.

    Args:
        group: all ranks.
        objects: objects whose state is saved besides the framework's.
        identity: what a resumed run must have in common; see ``resume_compat``.
    """

    def __init__(self, group: Group, objects: Sequence[Kept], identity: Mapping[str, Any]) -> None:
        self.group, self.objects, self.identity = group, objects, identity
        self.constant: dict[str, Any] = {}
        """Meta that is the same in all checkpoints of this attempt."""
        self.left_out: LeftOut | None = None
        """Frozen weights that stay in their source."""
        self.steps_seen = 0

    def begin(self, training: Training) -> None:
        """Prepare before the first step. Raises UserError if something cannot be saved."""
        self.tensors(training)
        self.constant = {
            "identity": self.identity,
            "config_hash": config_hash(self.identity),
            "versions": versions(),
            "other_names": dict(training.framework.facts.other_names),
        }

    def leave_out(self, record: FrozenRecord, training: Training) -> None:
        """Leave weights in their source, whose values the model has now."""
        framework = training.framework
        self.left_out = LeftOut(record, framework.state(), framework.host.synchronize)

    def tensors(self, training: Training) -> list[StateTensor]:
        """All tensors to save. Objects' rank-local state, equal on all pipeline stages, comes from the first."""
        tensors, _ = self._tensors_and_placements(training)
        return self.left_out.without(tensors) if self.left_out else tensors

    def now(self, training: Training, is_best: bool) -> tuple[list[StateTensor], dict[str, Any]]:
        """The tensors and meta to save at this step. Collective."""
        tensors, placements = self._tensors_and_placements(training)
        meta = {
            "state": training.state.to_json(),
            OBJECTS: placements,
            "framework": training.framework.facts.name,
            "best": is_best,
            "time": time.time(),
            "trained": trained_alone(tensors, training.world.pipeline),
            **self.constant,
        }
        if self.left_out:
            self.left_out.update(tensors, self.group.allgather)
            tensors = self.left_out.without(tensors)
            meta[FROZEN] = asdict(self.left_out.record)
        return tensors, meta

    def undeclared(self, training: Training) -> str | None:
        """In the first steps, compare state that must be equal on all ranks; after them, returns a warning of state
        that is not saved, if there is some. Collective."""
        if self.steps_seen == FIRST_STEPS:
            return None
        self.steps_seen += 1
        require_equal(self.group, self.objects, training.framework.facts.leaves, training.state.step)
        training.framework.state()  # lets the framework detect undeclared changes
        if self.steps_seen < FIRST_STEPS:
            return None
        left_out = self.group.allgather(training.framework.facts.undeclared, "name what is not saved")
        names = list(dict.fromkeys(name for of_rank in left_out for name in of_rank))
        return UNDECLARED.format(", ".join(names[:MOST_NAMED]) + ", ..." * (len(names) > MOST_NAMED)) if names else None

    def _tensors_and_placements(self, training: Training) -> tuple[list[StateTensor], Mapping[str, str]]:
        objects = state_of(self.objects, training.framework.facts.leaves)
        is_first = training.world.pipeline.rank == 0
        own = [tensor for tensor in objects.tensors if is_first or tensor.placement is not Placement.RANK]
        return [*training.framework.state(), *own], objects.placements


def trained_alone(tensors: Iterable[StateTensor], stages: Group | None = None) -> list[str] | None:
    """Names of the trained weights if others are frozen, as with an adapter; None if all are trained. Collective."""
    own = {it.name: it.is_trained for it in tensors if is_common(it.name, it.placement)}
    everywhere = (stages or Group("alone")).allgather(own, "name the weights that are trained")
    weights = {name: is_trained for each in everywhere for name, is_trained in each.items()}
    return None if all(weights.values()) else [name for name, is_trained in weights.items() if is_trained]


def verify_replicated(group: Group, tensors: Sequence[StateTensor], synchronize: Callable[[], None], step: int) -> None:
    """Raise RunFailed, on all ranks, if a tensor that should be equal on all ranks is not. Collective; slow."""
    sums = {}
    for tensor in tensors:
        if tensor.placement in (Placement.REPLICATED, Placement.FIRST):
            value = np.empty(tensor.shape, ITEM_TYPES[tensor.dtype])
            tensor.copy_into(value)
            synchronize()
            sums[tensor.name] = crc32(value.tobytes())
    of_ranks = group.allgather(sums, "compare what should be equal")
    unequal = [name for name in sums if len({ranks_sums.get(name) for ranks_sums in of_ranks}) > 1]
    if unequal:
        fix = "look for code that runs on some ranks only, or for random numbers that ranks do not share"
        raise RunFailed(f"{len(unequal)} tensors differ between ranks at step {step}: {', '.join(unequal[:5])}", fix)
