"""Which layers are compiled one by one, and that their gradients leave while others are still being computed."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from hpctrain.backends.torch.strategies.tp_group import TPGroup
from hpctrain.backends.torch.task.compiled import compile_layers, own_layers, twin_of
from hpctrain.comm.group import Group
from hpctrain.comm.world import alone
from hpctrain.config.sections import ParallelConfig, TrainConfig
from tests.tasks.torch_tasks import make_framework, mean_loss, train
from tests.unit.backends.torch.test_gradients import make

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler looks at it
SENT_BEFORE: list[int] = []
"""Number of buckets that had been sent when the backward pass of each block began, the last block first."""
sent: list[tuple[int, int]] = []
compiled = torch.compile
AOT = {"backend": "aot_eager"}
BATCH = {"x": torch.ones(4, 12).numpy(), "y": torch.zeros(4, dtype=torch.int64).numpy()}


@torch.library.custom_op("hpctrain_tests::note", mutates_args=())
def note(gradient: Tensor) -> Tensor:
    """Notes how many buckets have been sent; opaque to the compiler."""
    SENT_BEFORE.append(len(sent))
    return gradient.clone()


@torch.library.custom_op("hpctrain_tests::noted", mutates_args=())
def noted(values: Tensor) -> Tensor:
    """The values; its backward pass is ``note``."""
    return values.clone()


note.register_fake(torch.empty_like)
noted.register_fake(torch.empty_like)
noted.register_autograd(lambda _, gradient: note(gradient))


class Block(nn.Module):
    """A block that notes when its backward pass begins."""

    def __init__(self, inward: int = 8, outward: int = 8) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(inward, outward), nn.Dropout(0.2), nn.Linear(outward, outward)

    def forward(self, values: Tensor) -> Tensor:
        changed: Tensor = noted(self.last(self.drop(torch.tanh(self.first(values)))))
        return changed


class Net(nn.Module):
    """A stack of blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(12, 8)
        self.blocks = nn.ModuleList([Block(), Block(), Block(8, 6), Block(6, 6)])
        self.out = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        values = self.inward(inputs)
        for block in self.blocks:
            values = block(values)
        return self.out(values)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces and differentiates as for any backend, but generates no code, which takes a C++ compiler seconds."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, mode=None, **given: compiled(model, **AOT | given))
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # of the compiler's progress bars; its thread would stay
    torch._dynamo.reset()


def sent_before(compile_model: Any) -> list[int]:
    model = Net()
    reducer, recorder = make(model, bucket=64)
    called = compile_model(model)
    sent.clear()
    recorder.sent = sent
    SENT_BEFORE.clear()
    reducer.begin()
    mean_loss(called(torch.randn(5, 12)), {"y": torch.zeros(5, dtype=torch.int64)}).backward()
    return list(SENT_BEFORE)


def one_by_one(model: Net) -> Net:
    compile_layers(list(model.blocks), None)
    return model


def test_buckets_leave_while_later_layers_still_run_backward():
    eager, layers, whole = sent_before(lambda model: model), sent_before(one_by_one), sent_before(torch.compile)
    assert eager == sorted(eager) and eager[-1] > eager[0]
    assert layers == sorted(layers) and len(set(layers)) == 4, "each block's buckets leave before the next block begins"
    assert whole == [0, 0, 0, 0], "if this fails, models need not be compiled by layers any more"


def layers(model: nn.Module, ranks: int = 2, stages: int = 1, **train: Any) -> list[nn.Module]:
    config = TrainConfig(steps=1, global_batch=4, compile=True, **train)
    world = SimpleNamespace(data=SimpleNamespace(size=ranks), pipeline=SimpleNamespace(size=stages))
    settings = SimpleNamespace(train=config, parallel=ParallelConfig())
    opening: Any = SimpleNamespace(config=settings, model=model, world=world, gathers=False)
    return own_layers(opening)


def test_repeated_layers_are_compiled_one_by_one_if_something_is_exchanged():
    net = Net()
    assert layers(net) == list(net.blocks)
    assert layers(net, ranks=1) == layers(net, compile_mode="reduce-overhead") == []
    assert layers(net, ranks=1, stages=2) == list(net.blocks), "each rank calls some of them"
    assert layers(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))) == [], "too small to be compiled alone"


def test_layers_that_recompute_are_compiled_alone_and_their_parents_are_not():
    net = Net()
    assert layers(net, ranks=1, recompute=("blocks.*",)) == list(net.blocks)
    assert layers(net, ranks=2, recompute=("blocks.1.first",)) == [
        net.blocks[1].first, net.blocks[0], net.blocks[2], net.blocks[3],
    ]  # fmt: skip


def test_layers_of_one_structure_share_what_is_compiled_and_others_do_not():
    net = Net()
    compile_layers(list(net.blocks), None)
    functions = [block.forward.func for block in net.blocks]
    assert functions[0] is functions[1] and len({id(one) for one in functions}) == 3
    twin = twin_of(Block.forward, 7)
    assert twin.__code__ is not Block.forward.__code__ and twin.__code__.co_name == "forward_7"


def test_a_copy_of_a_compiled_layer_uses_its_own_weights():
    net = Net().eval()
    compile_layers(list(net.blocks), None)
    inputs = torch.randn(2, 12)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in net.blocks.parameters():
            parameter.zero_()
        assert not torch.equal(net(inputs), twin(inputs))


@pytest.mark.parametrize(
    "keys",
    [{"recompute": ("blocks.0", "blocks.1"), "ema_decay": 0.9}, {"compile_mode": "reduce-overhead"}],
)
def test_a_compiled_run_trains_as_an_eager_one(keys):
    eager = make_framework(alone(), Net, **{key: value for key, value in keys.items() if key != "compile_mode"})
    wanted = train(eager, 3, accumulate=2)
    framework = make_framework(alone(), Net, compile=True, **keys)
    assert train(framework, 3, accumulate=2) == pytest.approx(wanted, rel=1e-5), "fp32, another order of sums"
    assert framework.evaluate(BATCH)["loss"] == pytest.approx(eager.evaluate(BATCH)["loss"], rel=1e-5)


def test_what_is_tried_before_the_first_step_is_not_compiled():
    framework = make_framework(alone(), Net, compile=True, recompute=("blocks.*",))
    ran: list[bool] = []
    framework.model.out.register_forward_hook(lambda *_: ran.append(torch.compiler.is_compiling()))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    framework.dry_call(BATCH)
    assert ran and not any(ran)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    assert framework.facts.flops is not None, "operations are counted"


class WithExtraState(nn.Linear):
    """Adds an object to its ``state_dict``."""

    def get_extra_state(self) -> Any:
        return {"calls": 0}

    def set_extra_state(self, state: Any) -> None: ...


def test_layers_may_have_extra_state():
    layers = [WithExtraState(3, 3), WithExtraState(3, 3)]
    compile_layers(layers, None)
    assert layers[0].forward.func is layers[1].forward.func, "of equal structure"


def test_layers_of_pytorch_do_not_share_a_limit_of_recompilations(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, mode: compiled(function, backend="eager"))
    layers = [nn.TransformerEncoderLayer(2 * width, 1, 4, batch_first=True) for width in (1, 2, 3, 4)]
    compile_layers(layers, None)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for width, layer in enumerate(layers, start=1):
        for samples in (2, 3):
            layer(torch.ones(samples, 3, 2 * width))
        with torch.no_grad():
            layer(torch.ones(2, 3, 2 * width))
    frames = torch._dynamo.utils.counters["frames"]
    assert frames["ok"] == frames["total"] > torch._dynamo.config.recompile_limit


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
def test_split_layers_after_flex_attention_get_their_own_inputs():
    """Dynamo loses what Python code of the same graph sets after this operator."""
    tp_group = TPGroup(Group("tensor"))

    def block(values: Tensor) -> Tensor:
        heads = tp_group.inputs(values)[:, None]
        attended = flex_attention(*[heads.detach()] * 3)  # CPUs do not differentiate it
        return tp_group.inputs(tp_group.outputs(heads + attended) * 2)

    values = torch.randn(2, 4, 8, requires_grad=True)
    eager = block(values)
    tp_group.forget_inputs()
    assert torch.equal(torch.compile(block, backend="eager")(values), eager)
