"""Gradients of torch parameters that stay sparse, such as those of embeddings; separate from the flat buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from hpctrain.comm.group import Group
from hpctrain.reduce.row_exchange import RowExchange, Rows


class SparseGradients:
    """Sums sparse gradients, which autograd collects over the backward passes of an update.

    Afterwards each ``grad`` is sparse; after a sum over ranks it is coalesced, with ascending, unique rows. A dense
    gradient (of a table also used as a matrix) counts as having all rows.

    Args:
        parameters: tables with two axes, all on one device.
        group: the ranks; None for one process.
        dtype: dtype of sums over ranks.
    """

    def __init__(
        self, parameters: Sequence[Parameter], group: Group | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        self.parameters = parameters
        self.dtype = dtype
        shapes = [(parameter.shape[0], parameter.shape[1]) for parameter in parameters]
        host_dtype = torch.empty(0, dtype=dtype).numpy().dtype
        self.rows = RowExchange(group, shapes, host_dtype) if group is not None and parameters else None
        checks = torch.sparse.check_sparse_tensor_invariants
        if parameters and not checks.is_enabled():
            checks.disable()  # the default, but explicit: otherwise PyTorch's own optimizers warn

    def begin(self) -> None:
        """Starts an update: drops all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def exchange(self) -> None:
        """Replaces the parameters' gradients by their sums over the ranks."""
        if self.rows is None:
            for parameter in self.parameters:
                if parameter.grad is None or not parameter.grad.is_sparse:
                    parameter.grad = _sparse(parameter, *_rows_of(parameter))
            return
        found = [_rows_of(parameter) for parameter in self.parameters]
        host = [Rows(indices.cpu().numpy(), values.to("cpu", self.dtype).numpy()) for indices, values in found]
        for parameter, rows in zip(self.parameters, self.rows.sum(host), strict=True):
            parameter.grad = _sparse(parameter, torch.from_numpy(rows.indices), torch.from_numpy(rows.values))

    def gradients(self) -> list[torch.Tensor]:
        """The values of the gradients' rows, each row once, to be changed in place."""
        found = []
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.coalesce()
                found.append(parameter.grad._values())
        return found

    def close(self) -> None:
        """Drops gradients and frees the communicator."""
        self.begin()
        if self.rows is not None:
            self.rows.close()


def _rows_of(parameter: Parameter) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices, values) of this rank's gradient, with unique rows."""
    gradient = parameter.grad
    if gradient is None:
        return torch.empty(0, dtype=torch.int64), parameter.new_empty((0, parameter.shape[1]))
    if not gradient.is_sparse:
        return torch.arange(len(gradient), device=gradient.device), gradient.detach()
    gradient = gradient.coalesce()
    return gradient._indices()[0], gradient._values()


def _sparse(parameter: Parameter, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A gradient of these rows, ascending and unique."""
    return torch.sparse_coo_tensor(
        indices.to(parameter.device)[None],
        values.to(parameter.device, parameter.dtype),
        parameter.shape,
        is_coalesced=True,
        check_invariants=False,
    )
