"""What stands for a model on a stage: how a task may call it, and what of the state a stage saves."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpctrain.backends.joint_statistics import BatchNorms
from hpctrain.backends.torch.device import Compute
from hpctrain.backends.torch.reduce.reducer import NoReducer
from hpctrain.backends.torch.state.tensors import TorchTensor
from hpctrain.backends.torch.steps.update_step import Modes, StepParts
from hpctrain.backends.torch.steps.updates import GradientAccumulation
from hpctrain.backends.torch.strategies.exchange import HostExchange
from hpctrain.backends.torch.strategies.partition import uncut
from hpctrain.backends.torch.strategies.pipeline.pipeline_strategy import stages_of
from hpctrain.backends.torch.strategies.pipeline.pipelined import PipelineForwardBackward
from hpctrain.backends.torch.strategies.pipeline.stage import Coming, Stage
from hpctrain.backends.torch.strategies.pipeline.stage_state import StageState
from hpctrain.backends.torch.strategies.pipeline.stages import StageModel, layers_of, staged
from hpctrain.backends.torch.strategies.pipeline.tied import Tied
from hpctrain.comm.group import Group
from hpctrain.comm.world import World, alone
from hpctrain.errors import UserError
from hpctrain.tasks.definition import TorchTask
from hpctrain.train.clock import NO_CLOCK, Neighbours, Waiting
from hpctrain.train.state import ArrayTensor, Cut, Placement, StateTensor
from tests.support.thread_groups import Messages, ThreadGroup, in_threads

CPU = torch.device("cpu")
PATIENCE_S = 120.0


class Placed(Group):
    """A rank of a group that nobody asks."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        super().__init__(name)
        self.rank, self.size = rank, size


def test_layers_that_fail_are_named_with_their_line():
    task = TorchTask(nn.Linear(1, 1), layers=lambda model: [model.embedding])
    with pytest.raises(UserError, match=r"^layers= of the task fails: AttributeError: .*'embedding'.*pipelined.py:\d+"):
        stages_of(task, task.model, 2, 1)


def parts_of(task: TorchTask, model: nn.Module) -> StepParts:
    """What a pipeline shares with other programs."""
    nothing: Any = None
    modes = Modes(model)
    return StepParts(
        task, model, {}, alone(), Compute(CPU), NO_CLOCK, modes, uncut(), BatchNorms(), {}, nothing, nullcontext
    )


def of_forward(forward: Callable[[Any, Any], Any]) -> float:
    """The gradient of one weight, of an update on the only stage of a model."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    task = TorchTask(model, lambda outputs, batch: outputs.sum(), forward=forward)
    stage = Stage(Group("pipeline"), CPU)
    pipelined = PipelineForwardBackward(StageModel(model, [layers_of(model, None)]), stage, parts_of(task, model))
    accumulation = GradientAccumulation(NoReducer(list(model.named_parameters())), 1.0, 1)
    host = {"x": np.ones((1, 1), np.float32)}
    pipelined.run(accumulation, [host], NO_CLOCK)
    gradient = model[0].weight.grad
    assert isinstance(gradient, Tensor)
    return gradient.item()


def test_forward_may_do_something_before_and_behind():
    assert of_forward(lambda model, batch: 3 * model(2 * batch["x"])) == 6


def test_forward_may_ask_whether_it_trains():
    assert of_forward(lambda model, batch: (3 if model.training else 5) * model(batch["x"])) == 3


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (lambda model, batch: model(model(batch["x"])), "calls the model twice"),
        (lambda model, batch: model(batch["x"], batch["x"]), "calls the model with 2 arguments"),
        (lambda model, batch: model(x=batch["x"]), "calls the model with arguments by name"),
        (lambda model, batch: batch["x"].requires_grad_(), "does not call the model"),
    ],
)
def test_forward_calls_the_model_once_on_one_value(forward, said):
    with pytest.raises(UserError, match=said):
        of_forward(forward)


class Strict:
    """Messages of ranks that work on one at a time, each of which ends only when the other side has come to it."""

    in_order = True

    def __init__(self, group: Messages) -> None:
        self.group = group

    def post(self, values: Tensor, rank: int, tag: int) -> None:
        """Until the other rank expects it."""
        taken = queue.Queue[None]()
        self.group.to(rank, "strict").put((values.detach(), taken))
        taken.get(timeout=PATIENCE_S)

    def expect(self, into: Tensor, rank: int, tag: int) -> Callable[[str], None]:
        """Until the other rank posts it."""
        values, taken = self.group.coming(rank, "strict").get(timeout=PATIENCE_S)
        into.copy_(values)
        taken.put(None)
        return lambda what: None

    def settle(self, what: str) -> None:
        """All is through."""


def gradients(ranks: int, micro_batches: int, chunks: int = 1) -> list[Tensor]:
    """Of the layers of a model on so many ranks, after an update on samples of uneven micro-batches."""

    def on_a_rank(group: ThreadGroup) -> dict[str, Tensor]:
        model = nn.Sequential(*(nn.Linear(2, 2, bias=False, dtype=torch.float64) for _ in range(9)))
        for number, layer in enumerate(model.parameters()):
            layer.data = torch.eye(2, dtype=torch.float64) * (number % 4 + 1) / 3 + 0.5
        task = TorchTask(
            model, lambda outputs, batch: outputs.square().mean(), forward=lambda call, batch: call(batch["x"].mul_(2))
        )
        messages = Messages(group)
        exchange: Any = Strict(messages) if ranks > 1 else None
        stages = staged(model, layers_of(model, None), ranks, chunks)
        stage = Stage(messages, CPU, exchange=exchange, chunks=chunks)
        pipelined = PipelineForwardBackward(StageModel(model, stages.of(group.rank)), stage, parts_of(task, model))
        accumulation = GradientAccumulation(NoReducer(list(model.named_parameters())), 1.0, 1)
        sizes = [number % 3 + 1 for number in range(micro_batches)]
        hosts = [{"x": np.full((size, 2), 0.1 * size)} for size in sizes]
        pipelined.run(accumulation, hosts, NO_CLOCK)
        return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}

    found: dict[str, Tensor] = {}
    for own in in_threads(ranks, on_a_rank):
        found |= own
    return [found[name] for name in sorted(found)]


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "chunks"),
    [*itertools.product([2, 3, 4], range(1, 7), [1, 2]), (2, 5, 3), (2, 8, 4), (3, 7, 3)],
)
def test_ranks_never_wait_for_each_other_if_messages_wait_for_their_turn(ranks, micro_batches, chunks):
    """As they do with NCCL, which tests of real ranks cannot have here."""
    found, wanted = gradients(ranks, micro_batches, chunks), gradients(1, micro_batches)
    assert len(found) == len(wanted) == 9
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=0)


def saved_by(stage: int) -> list[StateTensor]:
    """Of some state, by the last data rank's second tensor rank."""
    groups = {"data": Placed("data", 2, 3), "tensor": Placed("tensor", 1, 2), "pipeline": Placed("pipeline", stage, 3)}
    world = World(Group("world"), local=Group("local"), node=0, nodes=1, host="host", **groups)
    number = np.zeros(())
    return StageState(world, ["1.weight", "k"], {}, []).placed(
        [
            TorchTensor("model/1.weight", torch.zeros(4, 2)),
            TorchTensor("optimizer/step/1.weight", torch.zeros(())),
            ArrayTensor("optimizer/group.number/0/k", number),
            TorchTensor("ema/k", torch.zeros(1)),
            TorchTensor("model/1.table", torch.zeros(3), Placement.RANK),
            ArrayTensor("loss_scale", number),
            ArrayTensor("rng/torch", number, Placement.RANK),
            ArrayTensor("held/loss/module/count", number, Placement.RANK),
            ArrayTensor("rng/held/loss/dict/generator", number, Placement.RANK),
        ]
    )


def test_state_of_a_parameter_is_that_of_the_ranks_of_its_stage():
    cuts = {tensor.name: tensor.cut for tensor in saved_by(1) if tensor.placement is Placement.CUT}
    assert cuts == {
        "model/1.weight": Cut((4, 2), (0, 0), 5, 6, (1,)),
        "optimizer/step/1.weight": Cut((), (), 5, 6, (1,)),
        "ema/k": Cut((1,), (0,), 5, 6, (1,)),
    }


def test_other_state_of_ranks_is_saved_by_one_stage():
    own = {stage: [one.name for one in saved_by(stage) if one.placement is Placement.RANK] for stage in range(3)}
    assert own == {
        0: ["model/1.table", "rng/torch"],
        1: ["model/1.table"],
        2: ["model/1.table", "held/loss/module/count", "rng/held/loss/dict/generator"],
    }
    assert all([one.placement for one in saved_by(stage)].count(Placement.REPLICATED) == 2 for stage in range(3))


def test_tied_parameters_may_have_any_memory_order():
    def on_a_rank(group):
        messages = HostExchange(Messages(group), Waiting(NO_CLOCK, Neighbours.PIPELINE))
        tied = nn.Parameter(torch.zeros(3, 2).t())
        tied.grad = (torch.arange(6.0) * 10**group.rank).view(3, 2).t()
        Tied(group.rank, {"table": (0, 1)}, messages).add(cast(Any, SimpleNamespace(summed=lambda: [("table", tied)])))
        assert tied.grad is not None
        return tied.grad

    for found in in_threads(2, on_a_rank):
        torch.testing.assert_close(found, (torch.arange(6.0) * 11).view(3, 2).t())


def test_gradients_that_are_being_sent_stay_if_later_passes_add_to_those_of_parameters():
    places, sent = nn.Parameter(torch.zeros(2, 3)), list[Tensor]()
    messages: Any = SimpleNamespace(post=lambda values, rank, tag: sent.append(values))
    stage = Stage(Placed("pipeline", 1, 2), CPU, exchange=messages)
    for factor in (1.0, 2.0):
        structure = {"tensor": ["torch.float32", [1, 2, 3], True]}
        received = stage.receive(Coming([torch.zeros(1, 2, 3)], [], "", structure, [0]))
        ((received.value + places[None]) * factor).sum().backward()
        stage.send_gradients(received, 0)
    assert places.grad is not None and places.grad.unique().tolist() == [3]
    assert [one.unique().tolist() for one in sent] == [[1], [2]]
