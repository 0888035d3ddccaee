"""Codes of errors: what programs know of them, whatever the sentences say."""

from __future__ import annotations

import copy
import errno
import sys

import numpy as np
import pytest

from hpctrain.errors import (
    Code,
    HpctrainError,
    NoRequeue,
    Replaced,
    RunFailed,
    UserError,
    code_of,
    code_of_text,
    kind_of,
)
from hpctrain.system.user_errors import blamed


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("a", "b"), Code.USER_ERROR),
        (RunFailed("a", "b"), Code.EXCEPTION),
        (NoRequeue("a", "b", Code.NAN), Code.NAN),
        (Replaced("a"), Code.IN_USE),
        (ValueError("No space left on device"), Code.EXCEPTION),
        (OSError(errno.ENOSPC, "x"), Code.DISK_FULL),
        (OSError(errno.EDQUOT, "x"), Code.DISK_FULL),
        (OSError(errno.EROFS, "x"), Code.READ_ONLY),
        (FileNotFoundError(errno.ENOENT, "x"), Code.EXCEPTION),
        (MemoryError(), Code.OUT_OF_MEMORY),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA"), Code.OUT_OF_MEMORY),
        (RuntimeError("Error code 12 (Cannot allocate memory)"), Code.OUT_OF_MEMORY),
        (ValueError("Error code 12 (Cannot allocate memory)"), Code.EXCEPTION),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), Code.OUT_OF_MEMORY),
        (RuntimeError("NCCL error in: a.cpp\nCuda failure 2 'out of memory'"), Code.OUT_OF_MEMORY),
        (RuntimeError("shape '[2, 3]' is invalid"), Code.EXCEPTION),
        (ConnectionRefusedError(errno.ECONNREFUSED, "x"), Code.NETWORK),
        (OSError("<urlopen error [Errno 111] Connection refused>"), Code.NETWORK),
        (TimeoutError("timed out"), Code.NETWORK),
        (FloatingPointError("loss is nan at step 5"), Code.NAN),
        (ValueError("the loss of nanotubes"), Code.EXCEPTION),
    ],
)
def test_every_error_has_a_code(error, code):
    assert code_of(error) is code


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.", Code.OUT_OF_MEMORY),
        ("OSError: [Errno 28] No space left on device", Code.DISK_FULL),
        ("urllib.error.URLError: <urlopen error [Errno -2] Name or service not known>", Code.NETWORK),
        ("ValueError: loss is NaN", Code.NAN),
        ("KeyError: 'Connection refused'", Code.EXCEPTION),
        ("", Code.EXCEPTION),
    ],
)
def test_the_last_line_of_a_programs_traceback_has_a_code(line, code):
    assert code_of_text(line) is code


def test_the_cause_of_an_error_is_more_precise_than_a_general_code():
    full = OSError(errno.ENOSPC, "x")
    assert code_of(caused(RunFailed("cannot write a file", "free space"), full)) is Code.DISK_FULL
    assert code_of(caused(UserError("a", "b"), caused(RunFailed("c", "d"), full))) is Code.DISK_FULL
    assert code_of(caused(UserError("a", "b", Code.HOROVOD), full)) is Code.HOROVOD
    assert code_of(caused(UserError("a", "b"), ValueError())) is Code.USER_ERROR


def test_a_copy_of_an_error_keeps_its_code():
    error: HpctrainError = copy.copy(NoRequeue("a", "b", Code.NAN))
    assert (error.what, error.fix, error.code) == ("a", "b", Code.NAN)


@pytest.mark.parametrize(
    ("value", "code"),
    [("nan", Code.NAN), ("of a later version", Code.UNKNOWN), (None, Code.UNKNOWN), ([], Code.UNKNOWN)],
)
def test_records_without_a_code_that_is_known(value, code):
    assert Code.read(value) is code


def test_a_call_of_sys_exit_in_the_users_code_is_an_error_that_names_its_line():
    """``hpctrain doctor`` of a file that parses its own arguments ended without a word."""
    with pytest.raises(UserError, match=r"sys.exit\(2\) was called \(test_errors.py:\d+"), blamed("f", ""):
        sys.exit(2)


@pytest.mark.parametrize(
    ("value", "kind"),
    [(1, "an int"), (np.zeros(1), "an ndarray"), (np.uint8(1), "a uint8"), ({}, "a dict"), (int, "the class int")],
)
def test_a_type_has_the_article_that_it_is_read_with(value, kind):
    assert kind_of(value) == kind
