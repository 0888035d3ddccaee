"""tf.profiler, for traces that TensorBoard shows."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import tensorflow as tf


class KerasProfiler:
    """See train.profile.Profiler. Writes ``<target>/plugins/profile/<time>/<host>.xplane.pb``."""

    def __init__(self) -> None:
        self.is_running = False

    def start(self, target: Path) -> None:
        try:
            tf.profiler.experimental.start(str(target))
        except tf.errors.OpError as error:  # the process is profiled already
            raise OSError(error.message) from error
        self.is_running = True

    def stop(self) -> None:
        self.is_running = False
        try:
            tf.profiler.experimental.stop()
        except tf.errors.OpError as error:
            raise OSError(error.message) from error

    def abandon(self) -> None:
        if self.is_running:
            self.is_running = False
            with suppress(tf.errors.OpError):
                tf.profiler.experimental.stop(save=False)
