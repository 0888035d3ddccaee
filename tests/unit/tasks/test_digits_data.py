"""The digits on disk."""

import os

import pytest

from hpctrain.errors import UserError
from hpctrain.tasks.digits_data import pack


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
    pytest.importorskip("sklearn")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="digits cannot be written"):
        pack(tmp_path / "file" / "digits")


def test_a_rank_that_comes_late_replaces_nothing_that_others_read(tmp_path, monkeypatch):
    datasets = pytest.importorskip("sklearn.datasets")
    load, done = datasets.load_digits, []

    def load_late():
        monkeypatch.setattr(datasets, "load_digits", load)
        done.extend(path.stat() for path in pack(tmp_path))
        return load()

    monkeypatch.setattr(datasets, "load_digits", load_late)
    paths = pack(tmp_path)
    assert len(done) == 2
    assert all(os.path.samestat(path.stat(), before) for path, before in zip(paths, done, strict=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.h5", "validation.h5"]
