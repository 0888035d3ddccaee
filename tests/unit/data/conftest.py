"""Fixtures: what ``data pack`` says when it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def refused(cli: Callable[..., Any]) -> Callable[..., str]:
    """``refused(*words)`` is what ``data pack`` says, after checking that it left nothing; the output is out.h5."""

    def run(*words: object) -> str:
        before = sorted(Path().rglob("*"))
        said = cli("data", "pack", *words, *([] if "-o" in words else ["-o", "out.h5"]), code=64).err
        assert sorted(Path().rglob("*")) == before
        return str(said)

    return run
