"""The digits on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.errors import UserError
from hpctrain.tasks.digits_data import pack


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="digits cannot be written"):
        pack(tmp_path / "file" / "digits")
