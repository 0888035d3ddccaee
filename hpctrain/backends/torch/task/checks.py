"""Checks a task before the first step, and tries its forward pass, loss and metrics on one batch; errors name the
field and the user's line."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_map

from hpctrain.backends.torch.reduce.gradients import watched
from hpctrain.backends.torch.state.optimizer import OptimizerPart
from hpctrain.backends.torch.task.shares import of_sparse_adam
from hpctrain.config.features import Feature, used
from hpctrain.errors import UserError
from hpctrain.system.user_errors import blamed, described, of_float64, shapes, trained_weight
from hpctrain.tasks.definition import Task
from hpctrain.tasks.mean_check import TOLERANCE, TOLERANCE_16_BITS, LossReader, require_mean


def require_trainable(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises UserError if a model cannot be trained with one backward pass and one optimizer step per update."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        fix = "leave torch.jit.script out; train.compile compiles a model"
        raise UserError("the task's model is a ScriptModule, whose state cannot be replaced", fix)
    own = set()
    for name, parameter in model.named_parameters():
        own.add(id(parameter))
        if isinstance(parameter, UninitializedParameter):
            raise UserError(
                f"parameter {name} has no shape yet, since its layer is a lazy one",
                "pass an example batch through the model before the task returns it",
            )
    for name, one in (*model.named_parameters(), *model.named_buffers()):
        if problem := unlike_memory(one):
            fix = "make it a separate dense tensor: .to_dense() or .clone(), outside torch.inference_mode()"
            raise UserError(f"{name} of the model {problem}, which can neither be saved nor loaded", fix)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        what = "no parameter of the task's model requires a gradient: nothing would be trained"
        raise UserError(what, "leave requires_grad on for what is to be trained")
    if not optimizers:
        raise UserError(
            "the task's optimizer neither is nor holds a torch.optim.Optimizer", "derive it from torch.optim.Optimizer"
        )
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if any(id(parameter) not in own for group in groups for parameter in group["params"]):
        raise UserError(
            "the optimizer updates tensors that are not parameters of the task's model",
            "make it from model.parameters() of the model that the task returns",
        )
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise UserError(
            "LBFGS evaluates the loss several times per update, but a step over several ranks only once",
            "use an optimizer whose step needs no closure, such as AdamW",
        )


def unlike_memory(tensor: Tensor) -> str:
    """Why values cannot be copied to and from a tensor in place; empty if they can."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        return "is a nested tensor" if tensor.is_nested else f"has the layout {tensor.layout}"
    if tensor.is_inference():
        return "was made in torch.inference_mode()"
    repeats = any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return "is expanded, so several elements share memory" if repeats else ""


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer has step hooks."""
    known = vars(optimizer)
    return any(known.get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post"))


def model_features(
    model: torch.nn.Module, parts: Sequence[OptimizerPart], joins: bool, ranks: int, unsuited: str | None = None
) -> dict[Feature, Any]:
    """Features that a model and its optimizers use.

    Args:
        model: the task's models as one.
        parts: its optimizers.
        joins: whether BatchNorm layers normalise over all ranks.
        ranks: number of data-parallel ranks.
        unsuited: class of an optimizer with unusual state, if any.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    volumes = [name for name, tensor in tensors if tensor.ndim == 5]
    compiled = [name or "the model" for name, module in model.named_modules() if is_compiled(module)]
    types = {str(one.dtype).removeprefix("torch.") for one in model.parameters() if one.requires_grad}
    half = [one for one in model.parameters() if one.requires_grad and one.dtype.itemsize < 4]
    tables = (Embedding, EmbeddingBag)
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, tables)]
    given = {
        Feature.COMPILED_MODEL: next(iter(compiled), None),
        Feature.HALF_PARAMETERS: bool(half),
        Feature.JOINT_LAYERS: joins and "a layer of the model",
        Feature.MAX_NORM: next((name for name, table in found if table.max_norm is not None), None),
        Feature.MIXED_PARAMETERS: len(types) > 1 and " and ".join(sorted(types)),
        Feature.OWN_OPTIMIZER_STATE: unsuited,
        Feature.OWN_PRECISION: types == {"float64"} and "it leaves parameters of 64 bits as they are",
        Feature.PARAMETER_HOOKS: next((name for name, one in model.named_parameters() if watched(one)), None),
        Feature.RANKS: ranks > 1 and ranks,
        Feature.SPARSE_ADAM: next(of_sparse_adam(model, parts), None),
        Feature.SPARSE_ROWS: next((name for name, table in found if table.sparse), None),
        Feature.STEP_HOOKS: next((type(part.optimizer).__name__ for part in parts if has_hooks(part.optimizer)), None),
        Feature.VOLUMES: next(iter(volumes), None),
    }
    return used(given)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether the task compiled this module, so that calls inside it cannot be intercepted."""
    by_itself = isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule"
    return by_itself or module._compiled_call_impl is not None


SCALAR = "return its mean over the samples, a scalar, or (sum, weight), two scalars"


def read(score: Any, samples: int) -> tuple[float, float, float]:
    """See mean_check.LossReader."""
    total, weight = score if isinstance(score, tuple) else (score * samples, samples)
    total = torch.as_tensor(total, device=None if isinstance(total, Tensor) else "cpu").detach()
    return float(total), float(weight), TOLERANCE_16_BITS if total.dtype.itemsize < 4 else TOLERANCE


TORCH = LossReader(read, tree_map, Tensor.clone)


def try_loss(
    task: Task,
    model: Any,
    batch: Mapping[str, Tensor],
    hint: str = "",
    again: Callable[[Mapping[str, Tensor]], Any] | None = None,
) -> Any:
    """Computes the loss. Raises UserError if it cannot be computed, has no gradients, or is not a mean over samples.

    Args:
        task: the task.
        model: the model.
        batch: a batch on the model's device.
        hint: a sentence on what may be wrong with the partition of the model.
        again: computes outputs in evaluation mode, see ``require_mean``.
    """
    outputs = forward(task, model, batch, hint)
    shown = described(outputs)
    fix = f"loss(outputs, batch) gets outputs {shown}, and the batch, a dict of {shapes(batch)}"
    with blamed("loss", with_hint(fix, hint)), warnings.catch_warnings():
        warnings.filterwarnings("error", message="Using a target size")  # a broadcast that is rarely intended
        score = task.loss(outputs, batch)
    require_score(score, "loss")
    total = score[0] if isinstance(score, tuple) else score
    if not isinstance(total, Tensor) or not total.requires_grad:
        shown = described(total)
        raise UserError(
            f"loss returned {shown} that does not depend on the model's parameters: nothing would be trained",
            "compute it from the outputs with torch operations, without .item(), .detach(), no_grad, argmax or NumPy",
        )
    require_mean(TORCH, "loss", task.loss, outputs, batch, again)
    return total


def try_sharded(loss: Tensor) -> None:
    """Raises UserError if a loss uses sharded parameters outside their layers. Collective."""
    try:
        loss.backward()
    except RuntimeError as error:
        raise UserError(
            f"the task's loss has no gradient while parallel.shard gathers layers: {str(error).splitlines()[0]}",
            "compute the loss from what the model returns, and not from gradients or parameters of it, which have "
            "memory only while their layers compute; or set parallel.shard: optimizer",
        ) from error


def try_metrics(task: Task, model: Any, batch: Mapping[str, Tensor]) -> None:
    """Raises UserError if the loss or a metric of an evaluation cannot be computed."""
    outputs = forward(task, model, batch)
    for key, metric in judges(task).items():
        name = f"metrics[{key!r}]" if key in task.metrics else key
        fix = (
            f"{name} gets (outputs, batch) in an evaluation: outputs {described(outputs)}, "
            f"and a dict of {shapes(batch)}"
        )
        with blamed(name, fix):
            score = metric(outputs, batch)
        require_score(score, name)
        require_mean(TORCH, name, metric, outputs, batch, functools.partial(task.forward, model))


def judges(task: Task) -> dict[str, Callable[[Any, Any], Any]]:
    """Functions that an evaluation reports, by name. A task with a custom step may have no loss."""
    loss = {} if task.loss is None else {"loss": task.loss}
    return {**loss, **task.mean_metrics}


def forward(task: Task, model: Any, batch: Mapping[str, Tensor], hint: str = "") -> Any:
    """Runs the forward pass; ``hint`` as for ``try_loss``."""
    fix = (
        f"forward(model, batch) gets the model and a dict of {shapes(batch)}; by default the model gets the first array"
        f"{of_float64(batch)}"
    )
    with blamed("the model or forward", with_hint(fix, hint)):
        outputs = task.forward(model, batch)
    if outputs is None:
        raise UserError("the model or forward returned None", "return the outputs: a return is missing")
    return outputs


def with_hint(fix: str, hint: str) -> str:
    """Appends a hint, if there is one, to a fix."""
    return f"{fix}. {hint}" if hint else fix


def require_score(score: Any, field: str) -> None:
    """Raises UserError unless a score is a scalar or a tuple of two scalars."""
    if score is None:
        raise UserError(f"{field} returned None", f"a return is missing: {SCALAR}")
    parts = score if isinstance(score, tuple) else (score,)
    if isinstance(score, tuple) and len(score) != 2:
        raise UserError(f"{field} returned {len(score)} values", SCALAR)
    if any(getattr(weight, "requires_grad", False) for weight in parts[1:]):
        raise trained_weight(field, "weight.detach()")
    for part in parts:
        if isinstance(part, Tensor) and part.numel() != 1:
            raise UserError(f"{field} returned a tensor of shape {list(part.shape)}", SCALAR)
        if isinstance(part, Tensor) and part.is_complex():
            raise UserError(f"{field} returned a complex number", "return a real one, such as its .abs()")
        if not isinstance(part, (Tensor, int, float)):
            try:
                float(part)  # a NumPy number
            except (TypeError, ValueError):
                fix = f"{SCALAR}; of several losses return the sum, and give the parts as metrics="
                raise UserError(f"{field} returned {described(part)}", fix) from None
