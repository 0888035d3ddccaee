"""The order of system calls, as strace records it, and what a power loss at any of them leaves."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.power_loss import Call
from tests.support.power_loss_checks import announces, check_losses, check_order, record

SEED = int.from_bytes(os.urandom(4), "little")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded").resolve()


@pytest.fixture(scope="module")
def calls(root: Path) -> list[Call]:
    return record(root, [sys.executable], dict(os.environ), "alone")


def test_everything_is_synced_before_the_rename_and_the_rename_before_anything_else(calls):
    check_order(calls)


@pytest.mark.parametrize("kind", ["shard", "manifest", "folder"])
def test_an_order_without_a_sync_is_found(calls, kind):
    """The check is no empty one."""
    wanted = {"shard": ".h5", "manifest": "manifest.json", "folder": "checkpoints"}[kind]
    second_save = calls[next(number for number, call in enumerate(calls) if announces(call)) :]
    skipped = next(call for call in second_save if call.name == "fsync" and call.path.endswith(wanted))
    with pytest.raises(AssertionError, match=r"was synced|were synced"):
        check_order([call for call in calls if call is not skipped])


@pytest.mark.slow
def test_a_power_loss_after_any_call_leaves_a_sound_newest_checkpoint(root, calls, tmp_path):
    check_losses(root, calls, tmp_path, SEED)
