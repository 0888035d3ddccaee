"""Weights in files of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.checkpoint.format.files import reading
from hpctrain.checkpoint.format.layout import ITEM_TYPES
from hpctrain.errors import UserError

INNER = ("state_dict", "model_state_dict", "model", "module")
"""Under which key programs save a model's state beside their own: Lightning, PyTorch's tutorials, timm, DeepSpeed."""


def read_torch_file(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Arrays (bfloat16 as uint16) and logical types by name, of a ``state_dict`` or of a mapping that holds one.

    Only tensors are read (``weights_only=True``): no code of the file is run.

    Raises:
        UserError: it is none, or holds more than tensors, lists, mappings and numbers.
        UnreadableCheckpoint: it cannot be read now.
    """
    with reading(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # PyTorch raises what it finds: UnpicklingError, RuntimeError, EOFError, KeyError
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(
                f"{path} is not a file of PyTorch that holds only weights: {first[:200]}",
                "save it with torch.save(model.state_dict(), path): objects are not read, since that runs their code",
            ) from error
    state = state_dict_in(content, path)
    arrays, dtypes = {}, {}
    for name, value in state.items():
        if str(name).endswith("_extra_state"):  # which is state, but no weight
            continue
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            kind = str(value.layout) if isinstance(value, Tensor) else type(value).__name__
            raise UserError(f"{name} of {path} is a {kind}, not a dense tensor", "save model.state_dict() alone")
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in ITEM_TYPES:
            raise UserError(f"{name} of {path} is {dtype}, which cannot be read", "save weights as numbers of 16 bits")
        host = value.detach().contiguous()
        arrays[str(name)] = host.view(torch.int16).numpy().view(np.uint16) if dtype == "bfloat16" else host.numpy()
        dtypes[str(name)] = dtype
    return arrays, dtypes


def state_dict_in(content: Any, path: Path) -> Mapping[str, Any]:
    """The model's state in what was saved."""
    inner = next((content[key] for key in INNER if key in content), content) if isinstance(content, Mapping) else None
    if not isinstance(inner, Mapping) or not any(isinstance(value, Tensor) for value in inner.values()):
        raise UserError(
            f"{path} holds no state_dict", f"save model.state_dict(), by itself or under one of {', '.join(INNER)}"
        )
    return inner
