"""Graphs run as they are traced: to optimize them takes a third of the time, and these tests run each a few times.

Those of tests/dist are optimized, as users' are.
"""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _graphs_as_traced() -> Iterator[None]:
    import tensorflow as tf  # not where all tests are collected: it takes seconds

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
