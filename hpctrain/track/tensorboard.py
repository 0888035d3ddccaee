"""Scalars for TensorBoard, in <run folder>/tensorboard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.errors import MissingExtra
from hpctrain.track.scalars import scalars


class TensorBoardSink:
    """Writes through tensorboardX, whose own thread does the writing."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            MissingExtra: tensorboardX is not installed.
        """
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise MissingExtra("tensorboardX", "tensorboard") from error
        self.open = lambda step: SummaryWriter(str(folder), purge_step=step, write_to_disk=True)
        self.writer: Any = None

    def event(self, event: Mapping[str, Any]) -> None:
        """See Sink. What an earlier attempt wrote beyond this attempt's first step is hidden by TensorBoard."""
        if self.writer is None:
            self.writer = self.open(event["step"] + 1 if event["step"] else None)
        for name, value in scalars(event).items():
            self.writer.add_scalar(name, value, event["step"], walltime=event["time"])

    def close(self) -> None:
        """See Sink."""
        if self.writer is not None:
            self.writer.close()
