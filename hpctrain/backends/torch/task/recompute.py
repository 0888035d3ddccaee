"""Activation checkpointing: recomputes layers' activations in the backward pass to save memory at the cost of time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.nn import Module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hpctrain.backends.torch.strategies.strategy import PreparedModel, Strategy, StrategyContext
from hpctrain.backends.torch.strategies.tensor import CONTAINERS
from hpctrain.errors import UserError

AT = torch.ops.aten
PRODUCTS = (
    *(AT.mm.default, AT.addmm.default, AT.bmm.default, AT.baddbmm.default, AT.convolution.default),
    *(AT._scaled_dot_product_flash_attention.default, AT._scaled_dot_product_flash_attention_for_cpu.default),
    *(AT._scaled_dot_product_efficient_attention.default, AT._scaled_dot_product_cudnn_attention.default),
)
"""Operations that take most of a layer's time."""


def planned(context: StrategyContext) -> Strategy:
    """The strategy for ``train.recompute``; does nothing if it names no layer."""
    return functools.partial(save_memory, context)


def save_memory(context: StrategyContext, prepared: PreparedModel) -> PreparedModel:
    """Makes the configured layers recompute their activations."""
    train = context.config.train
    kept = PRODUCTS if train.recompute_keeps == "products" else ()
    recompute(context.model, train.recompute, kept)
    return prepared


def recompute(model: Module, patterns: Sequence[str], kept: Sequence[Any] = ()) -> list[str]:
    """Makes layers of a model recompute, in place. Names and parameters do not change; results are bitwise identical.

    Args:
        model: the model.
        patterns: patterns of layer names, such as ``blocks.*``; ``*`` means all layers. A layer inside a matching one
            is part of it.
        kept: operations whose results layers keep besides their inputs.

    Returns:
        The names of the layers.

    Raises:
        UserError: a pattern matches no layer or part of one, or one that the task has compiled.
    """
    layers = dict(named_layers(model, patterns))
    inside = [f"{name}.{inner}".rstrip(".") for name, layer in layers.items() for inner, _ in layer.named_modules()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in inside):
            have = ", ".join(name for name, _ in named_layers(model, ["*"])) or "none"
            raise UserError(f"train.recompute: no layer of the model is called {pattern}", f"its layers are: {have}")
    traced = {id(part) for module in model.modules() for part in traced_parts(module)}
    for name, layer in layers.items():
        if id(layer) in traced:
            raise UserError(
                f"train.recompute: the task compiles {name}, and the compiler itself decides what to recompute",
                "leave it out of train.recompute, or torch.compile out of the task",
            )
    for layer in layers.values():
        layer.forward = functools.partial(Recomputed(layer, kept), layer.forward)
    return list(layers)


def traced_parts(module: Module) -> Iterable[Module]:
    """Modules that the compiler traces if this module is compiled, by torch.compile (a wrapper) or in place."""
    if type(module).__name__ == "OptimizedModule":
        return module._orig_mod.modules()  # type: ignore[union-attr]
    return module.modules() if module._compiled_call_impl is not None else ()


def named_layers(module: Module, patterns: Sequence[str], path: str = "") -> Iterator[tuple[str, Module]]:
    """Outermost layers whose names match a pattern."""
    for name, child in module.named_children():
        full = f"{path}{name}"
        if not isinstance(child, CONTAINERS) and any(fnmatchcase(full, pattern) for pattern in patterns):
            yield full, child
        else:
            yield from named_layers(child, patterns, f"{full}.")


class Recomputed:
    """A layer's forward pass that saves only its inputs.

    The layer's buffers (running statistics, power iterations) are updated only once: the second pass starts from the
    same values as the first, and its changes are undone.

    Args:
        layer: the module.
        kept: operations that the second pass does not compute again, unless they draw random numbers.
    """

    def __init__(self, layer: Module, kept: Sequence[Any]) -> None:
        self.layer, self.kept = layer, list(kept)
        self.changing: set[str] | None = None
        """Names of buffers that a forward pass changes (others are masks and tables); None before the first pass."""

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Computes the layer's outputs."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        before: dict[str, torch.Tensor] = {}

        def passes() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
            own = self._first(before), self._second(before)
            keeping = create_selective_checkpoint_contexts(self.policy) if self.kept else (nullcontext(), nullcontext())
            return within(own[0], keeping[0]), within(own[1], keeping[1])

        # Of arguments by name, torch would not restore the random state of the device.
        given = *args, *kwargs.values()
        return checkpoint(called, forward, tuple(kwargs), *given, use_reentrant=False, context_fn=passes)

    def policy(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Whether an operation's result is kept.

        Results of random operations are not: the second pass must draw as often as the first one.
        """
        keeps = operation in self.kept and not draws(operation, args, kwargs)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    @contextlib.contextmanager
    def _first(self, before: dict[str, torch.Tensor]) -> Iterator[None]:
        buffers = dict(self.layer.named_buffers())
        versions = {name: buffer._version for name, buffer in buffers.items()}
        copied = buffers.keys() if self.changing is None else self.changing
        before.update((name, buffers[name].clone()) for name in copied)
        yield
        if not self.layer.training:
            return
        if self.changing is None:  # by value: BatchNorm's kernels do not increment versions
            self.changing = {
                name for name, buffer in self.layer.named_buffers() if not torch.equal(buffer, before[name])
            }
        for name, buffer in self.layer.named_buffers():
            if name not in self.changing and (buffer is not buffers[name] or buffer._version != versions[name]):
                what = f"a layer of train.recompute has changed its buffer {name}, unlike in its first pass"
                raise UserError(what, "leave the layer out of train.recompute")

    @contextlib.contextmanager
    def _second(self, before: dict[str, torch.Tensor]) -> Iterator[None]:
        tables = [(module._buffers, dict(module._buffers)) for module in self.layer.modules()]
        # Other tensors: passes under way have saved the buffers, and this one may save its own.
        own = {id(buffer): before[name].clone() for name, buffer in self.layer.named_buffers() if name in before}
        for table, buffers in tables:
            table.update((name, own[id(buffer)]) for name, buffer in buffers.items() if id(buffer) in own)
        try:
            yield
        finally:
            for table, buffers in tables:
                table.update(buffers)


def called(function: Callable[..., Any], names: Sequence[str], *given: Any) -> Any:
    """Calls a function with arguments of which the last ones have names."""
    count = len(given) - len(names)
    return function(*given[:count], **dict(zip(names, given[count:], strict=True)))


def draws(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation draws random numbers; attention does so only with dropout."""
    names = [argument.name for argument in operation._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    share = given.get("dropout_p", 0.0 if "dropout_p" in names else 1.0)
    return torch.Tag.nondeterministic_seeded in operation.tags and share > 0


@contextlib.contextmanager
def within(outer: AbstractContextManager[object], inner: AbstractContextManager[object]) -> Iterator[None]:
    """Both contexts."""
    with outer, inner:
        yield
