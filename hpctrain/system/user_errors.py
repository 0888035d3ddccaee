"""Messages for errors in user code, which name the field of the task and the line."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.errors import UserError, foreign_errors, kind_of

PACKAGE = Path(__file__).parents[1]
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders that installed libraries are in."""
MOST_CHARACTERS = 400
"""Limit on the length of a quoted error message."""
DUMPS = ("\n\nArguments received by", "\n\nCall arguments received by", "\n\nStack trace", "\nOriginal stack trace")
"""Start of the parts of Keras and TensorFlow messages that are of no use to users."""
PREFIX = re.compile(
    r"Exception encountered when calling [^\n]*\n+|Could not automatically infer [^\n]* Error encountered:"
    r"|\{\{[^}]*\}\}\s*|\x1b\[[0-9;]*m"
)
ADVICE = {
    r"expected target dtype to be Long|expected scalar type Long": "Classes are whole numbers: array.astype(np.int64)",
    r"[Tt]arget \d+ is out of bounds|outside the valid range of": (
        "Classes count from 0, and the last layer has an output for each of them"
    ),
    r"data type 'str'|a value \(\{|'(dict|tuple)' object has no attribute|, not (dict|tuple)$|valid indices, got '": (
        "The outputs come first, then the batch; of several outputs take one, as in loss(outputs['logits'], batch['y'])"
    ),
    r"does not require grad": (
        "hpctrain calls backward itself, and evaluates without gradients: put what needs some there into "
        "with torch.enable_grad():"
    ),
    r"Complex(Float|Double)": (
        "Complex arrays need complex weights (dtype=torch.complex64), or give real and imaginary parts as two channels"
    ),
    r"must have the same dtype(?!.*Complex)": (
        "Arrays for a model are float32 (array.astype(np.float32)), as are its weights: leave .half() and .double() out"
    ),
    r"Found dtype \w+ but expected": "Targets are of the type of the outputs: array.astype(np.float32)",
    r"backward through the graph a second time": (
        "Detach what the model keeps from one batch to the next (state.detach()), and call backward nowhere"
    ),
    r"Using a target size": "Give them the same shape, for example by outputs.squeeze(1)",
    r"modified by an inplace operation": (
        "Something in model or loss overwrites what the backward pass needs: write x = x + 1 for x += 1, and leave "
        "inplace=True out"
    ),
    r"process group has not been initialized|Horovod has not been initialized|not MirroredVariable": (
        "hpctrain averages gradients itself: leave DistributedDataParallel, hvd and tf.distribute out"
    ),
    r"Invalid input shape": "Data hold samples, not batches: leave .batch() out of a tf.data.Dataset",
    r"argument '\w*callbacks'": "Callbacks are hooks, or keys of the run file such as train.early_stop",
    r"argument '(epochs|batch_size)'": "train.epochs and train.global_batch are keys of the run file",
    r"argument '(sample|class)_weight'": "Weights are an array of the data, which the loss, or fit_data, takes",
    r"argument 'validation_split'": "Split the arrays, and give validation=",
    r"not compiled with CUDA": "hpctrain moves model and batch to a GPU if there is one: leave .cuda() and .to() out",
    r"tensors to be on the same device|is on cpu, different from other tensors": (
        "hpctrain moves the model, modules of the loss, and the batch: make other tensors buffers of such a module, or "
        "write values.to(outputs.device)"
    ),
    r"cannot assign to field": "A task's fields are fixed: write task = dataclasses.replace(task, name=value)",
    r"EOF when reading a line": "No one can answer a batch job's questions: give the answer in task_args",
    r"surrogates not allowed|'ascii' codec can't encode": "What is printed or written must be text: use ascii(text)",
    r"empty parameter list": "Weights are attributes of type nn.Parameter, and lists of layers are nn.ModuleList",
    r"before Module\.__init__\(\) call": "Begin __init__ of the class with super().__init__()",
}
"""Advice to add to a fix, by pattern of common framework errors."""
SUFFIX = re.compile(r"\s*\[Op:\w+\].*", re.S)
NUMBERS = re.compile(r"\[[-+\d.,\se\[\]]{60,}")
"""The values of an array."""


def blamed(field: str, fix: str) -> AbstractContextManager[None]:
    """Turn errors in the body into UserErrors that name a field of the task and the line; HpctrainErrors propagate."""
    return foreign_errors(partial(blame, field, fix))


def blame(field: str, fix: str, error: BaseException) -> UserError:
    """Describe an error in the task's code, with the field of the task and the line."""
    text = words(error)
    what = f"{field} fails on the first batch: {type(error).__name__}: {text}{own_line(error)}"
    return UserError(what, advised(fix, text))


def advice_on(text: str) -> list[str]:
    """The advice for errors that contain this text."""
    return [advice for pattern, advice in ADVICE.items() if re.search(pattern, text)]


def advised(fix: str, text: str) -> str:
    """The fix, with the advice for errors that contain this text."""
    return ". ".join([fix, *advice_on(text)])


def words(error: BaseException) -> str:
    """An error's message on one line, without dumps, cut to MOST_CHARACTERS."""
    text = str(error)
    metadata = vars(error).get("ag_error_metadata")
    if metadata is not None:  # TensorFlow's AutoGraph wraps the message in its own stack trace
        text = metadata.cause_message
    for dump in DUMPS:
        text = text.partition(dump)[0]
    text = " ".join(NUMBERS.sub("[...]", SUFFIX.sub("", PREFIX.sub("", text))).split())
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ..."


def own_line(error: BaseException) -> str:
    """The innermost line in the user's code, else the innermost line: ``' (task.py:12: `return loss`)'``."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_users(frame.filename, PACKAGE)]
    found = (own or frames)[-1:]
    return _shown(found[0], bool(own)) if found else ""


def calling_line() -> str:
    """The current line in the user's code, if any: ``' (task.py:12: `ctx.update()`)'``."""
    for frame in reversed(traceback.extract_stack()):
        if _is_users(frame.filename, PACKAGE / "backends", Path(__file__)):
            return _shown(frame)
    return ""


def _shown(frame: traceback.FrameSummary, quotes: bool = True) -> str:
    code = f": `{frame.line}`" if frame.line and quotes else ""
    return f" ({Path(frame.filename).name}:{frame.lineno}{code})"


def _is_users(filename: str, *ours: Path) -> bool:
    """Whether a file is the user's: not from an installed library, Python, or one of the paths ``ours``."""
    path = Path(filename)
    return not (
        filename.startswith("<frozen ")
        or INSTALLED.intersection(path.parts)
        or any(path.is_relative_to(folder) for folder in (STANDARD_LIBRARY, *ours))
    )


def shapes(batch: Mapping[str, Any]) -> str:
    """Names and shapes of a batch's arrays: ``x [32, 8], y [32]``."""
    return ", ".join(f"{name} {list(array.shape)}" for name, array in batch.items())


def described(value: Any) -> str:
    """Shapes and types in words."""
    if (shape := getattr(value, "shape", None)) is not None:
        return f"a tensor of shape {list(shape)}"
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value))}"
    return f"{kind_of(value)} of {len(value)}" if isinstance(value, (tuple, list)) else kind_of(value)


def target_of(fields: Sequence[str], loss: str) -> str:
    """The array with which a framework's loss compares outputs: the second of two.

    Raises UserError if there are not two.
    """
    if len(fields) != 2:
        raise UserError(
            f"loss={loss} compares the outputs with the second of two arrays, and samples hold {', '.join(fields)}",
            "name the array yourself: loss=lambda outputs, batch: ...(outputs, batch['y'])",
        )
    return fields[1]


def no_such_loss(name: str, known: Sequence[str]) -> UserError:
    """The error for an unknown loss name."""
    return UserError(f"loss={name!r} names no loss", f"write one of {', '.join(known)}, or a function(outputs, batch)")


def not_called(name: str) -> UserError:
    """The error for a loss that is a class instead of an object."""
    return UserError(f"loss={name} is a class", f"make an object of it: loss={name}()")


def no_mean(name: str) -> UserError:
    """The error for a loss that is not the mean over the samples."""
    fix = (
        "leave its reduction at the mean, and ignore_class out of compile, or return (sum, weight) from a "
        "function(outputs, batch)"
    )
    return UserError(f"loss={name} is not the plain mean over the samples, so ranks would average it wrongly", fix)


def trained_weight(field: str, constant: str) -> UserError:
    """The error for a (sum, weight) whose weight has a gradient, as the second of two losses has."""
    return UserError(
        f"{field} returned (sum, weight) with a weight that depends on the model's parameters",
        f"of two losses return the sum, and give the parts as metrics=; if it is a weight, return {constant}",
    )


def no_such_field(error: TypeError, fields: Sequence[str]) -> UserError:
    """The error for a task created with an unknown or duplicate field."""
    said = words(error)
    return UserError(
        f"the task cannot be made: {said}{own_line(error)}", advised(f"its fields are {', '.join(fields)}", said)
    )


def of_float64(batch: Mapping[str, Any]) -> str:
    """Advice to add to a fix if arrays are float64, NumPy's default, and models are float32; else empty."""
    wide = [name for name, array in batch.items() if str(array.dtype).rpartition(".")[2] == "float64"]
    verb = "are" if wide[1:] else "is"
    return f". {', '.join(wide)} {verb} float64 and models are float32: use array.astype(np.float32)" if wide else ""
