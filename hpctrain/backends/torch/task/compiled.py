"""``train.compile``: torch.compile of whole models, or of their repeated layers one by one.

The backward pass of a compiled model is one call, at whose end all gradients are ready: nothing could be sent while it
runs (PyTorch, ``torch/_dynamo/backends/distributed.py``, "Note [DDPOptimizer]"). With several ranks, each repeated
layer is therefore compiled by itself, as in torchtitan, which also takes a fraction of the time to compile.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from hpctrain.backends.torch.strategies.fsdp.layers import layers_of
from hpctrain.backends.torch.strategies.strategy import PreparedModel, Strategy, StrategyContext, identity
from hpctrain.backends.torch.task.recompute import named_layers
from hpctrain.config.features import Feature

MODES = {"default": None, "max-autotune": "max-autotune-no-cudagraphs", "reduce-overhead": "reduce-overhead"}
"""torch's modes by ``train.compile_mode``; torch's own max-autotune would record CUDA graphs as well."""


def planned(context: StrategyContext) -> Strategy | None:
    """The strategy for ``train.compile``."""
    return functools.partial(compile_task, context) if context.config.train.compile else None


def compile_task(context: StrategyContext, prepared: PreparedModel) -> PreparedModel:
    """Compiles the repeated layers in place, or leaves the models to be compiled whole; and the loss."""
    mode = MODES[context.config.train.compile_mode]
    by_layers = never_whole(context)
    if mode == "reduce-overhead" and (by_layers or context.world.tensor.size > 1):
        # CUDA graphs read parameters at fixed addresses, overwrite what they returned for other micro-batches, and make
        # no exchanges that the monitor sees.
        mode = None
    layers = [] if Feature.COMPILED_MODEL in context.features else own_layers(context)
    advice = [NO_LAYER] if by_layers and not layers else []
    compile_layers(layers, mode)
    whole = functools.partial(torch.compile, mode=mode)
    if mode == "reduce-overhead" and context.world.data.size == 1:  # with several ranks, sums have their own memory
        for parameter in context.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(keep_gradient)
    eager = functools.partial(torch.compiler.set_stance, "force_eager")
    compiles = identity if layers or by_layers else whole
    return dataclasses.replace(prepared, compile_model=compiles, compile_loss=whole, uncompiled=eager, advice=advice)


NO_LAYER = (
    "train.compile finds no layer to compile: with parallel.pipeline, or with parallel.shard: parameters or gradients, "
    "it compiles blocks of a class of which a PyTorch model has several, each by itself"
)


def never_whole(context: StrategyContext) -> bool:
    """Whether a whole model would be no single graph: it is gathered by layers, or each rank has some of them."""
    return context.gathers or context.world.pipeline.size > 1


def own_layers(context: StrategyContext) -> list[Module]:
    """Layers to compile one by one; empty if models are to be compiled whole.

    Models are compiled whole on one rank, which exchanges nothing, and for CUDA graphs, which pay for models so small
    that launching kernels takes longer than computing. Layers that recompute, are gathered or are in a pipeline are
    always compiled one by one.
    """
    train, model = context.config.train, context.model
    recomputing = [layer for _, layer in named_layers(model, train.recompute)]
    as_whole = context.world.data.size == 1 or train.compile_mode == "reduce-overhead"
    if as_whole and not recomputing and not never_whole(context):
        return []
    return list(apart(recomputing, repeated(layers_of(model, context.config.parallel.layers))))


def repeated(layers: Sequence[Module]) -> list[Module]:
    """The layers of several modules each whose class occurs more than once."""
    classes = Counter(map(type, layers))
    return [layer for layer in layers if classes[type(layer)] > 1 and any(layer.children())]


def apart(first: Sequence[Module], others: Iterable[Module]) -> Iterator[Module]:
    """All of ``first``, and those of the others that neither contain one of them nor are inside one."""
    yield from first
    inside = {id(module) for layer in first for module in layer.modules()}
    yield from (layer for layer in others if not inside & {id(module) for module in layer.modules()})


def compile_layers(layers: Sequence[Module], mode: str | None) -> None:
    """Compiles the forward passes of layers in place; hooks and checkpointing around them stay outside.

    Layers of equal structure share one compiled function. Others get one with a separate code object: the compiler
    keeps its results, and what it has learned of shapes, per code object, and would take the different widths of a
    ResNet's blocks for one dynamic shape.
    """
    known: dict[Hashable, Callable[..., Any]] = {}
    for layer in layers:
        function = type(layer).forward
        if "forward" in vars(layer) or not isinstance(function, FunctionType):
            layer.forward = torch.compile(layer.forward, mode=mode)
            continue
        tensors = (*layer.named_parameters(), *layer.named_buffers())
        structure = type(layer), *((name, one.shape, one.dtype) for name, one in tensors)
        if structure not in known:
            known[structure] = torch.compile(twin_of(function, len(known)), mode=mode)
        layer.forward = functools.partial(known[structure], layer)  # partial: a copy of the layer calls itself


def keep_gradient(parameter: Tensor) -> None:
    """Moves a gradient out of the memory of CUDA graphs, which the next pass overwrites."""
    if parameter.grad is not None:
        parameter.grad = parameter.grad.clone()


def twin_of(function: FunctionType, number: int) -> FunctionType:
    """The same function, with a separate code object and name.

    Functions of PyTorch get a separate file name: the compiler calls those from PyTorch's files in one function, which
    would share its limit of recompilations.
    """
    name = f"{function.__code__.co_name}_{number}"
    file = function.__code__.co_filename
    is_theirs = function.__module__.partition(".")[0] == "torch"
    code = function.__code__.replace(co_name=name, co_filename=f"<{name}>" if is_theirs else file)
    twin = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin
