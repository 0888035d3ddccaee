"""The end of a process that has used gloo."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable

import pytest

from hpctrain.backends.torch.strategies.group import GLOO_THREAD, await_gloo

PR_SET_NAME = 15


@pytest.fixture
def busy() -> Callable[[str], threading.Event]:
    """``busy(name)`` starts a thread that the kernel knows by that name; it says when it has computed for a while."""

    def start(name: str) -> threading.Event:
        named, over = threading.Event(), threading.Event()

        def compute() -> None:
            ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
            named.set()
            hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # without the interpreter's lock, as gloo computes
            over.set()
            rest.wait(10)

        threading.Thread(target=compute, daemon=True).start()
        named.wait(10)
        return over

    rest = threading.Event()
    yield start
    rest.set()


def test_the_end_waits_until_gloos_threads_have_nothing_left_to_do(busy: Callable[[str], threading.Event]) -> None:
    over = busy(GLOO_THREAD)
    await_gloo(60)
    assert over.is_set()


def test_the_end_does_not_wait_for_others_nor_for_ever(busy: Callable[[str], threading.Event]) -> None:
    others = busy("numpy")
    await_gloo(60)
    assert not others.is_set()
    over = busy(GLOO_THREAD)
    await_gloo(0.05)
    assert not over.is_set()
