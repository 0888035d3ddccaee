"""torch Datasets as data."""

import numpy as np
import pytest

from hpctrain.data.dataset import Field
from hpctrain.data.formats.sources import open_dataset
from hpctrain.errors import UserError

torch = pytest.importorskip("torch")
X = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
Y = np.arange(20)


def test_a_map_style_dataset_is_read_by_index():
    dataset = open_dataset(torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)))
    assert dataset.fields == {"x": Field((3,), X.dtype), "y": Field((), Y.dtype)}
    samples = dataset.read(np.array([7, 0]))
    assert np.array_equal(samples["x"], X[[7, 0]]) and samples["y"].tolist() == [7, 0]


def test_samples_may_be_dicts_and_tuples_may_be_named():
    class Dicts(torch.utils.data.Dataset):
        def __len__(self):
            return 20

        def __getitem__(self, index):
            return {"image": X[index], "label": index}

    assert list(open_dataset(Dicts()).fields) == ["image", "label"]
    assert list(open_dataset(Dicts(), ["label"]).fields) == ["label"]
    pair = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    assert list(open_dataset(pair, ["image", "label"]).fields) == ["image", "label"]
    with pytest.raises(UserError, match="2 parts"):
        open_dataset(pair, ["image"])


def test_a_failing_or_different_sample_is_named():
    class Bad(torch.utils.data.Dataset):
        def __len__(self):
            return 20

        def __getitem__(self, index):
            if index == 7:
                raise OSError("unreadable")
            return torch.zeros(4 if index == 9 else 3)

    dataset = open_dataset(Bad())
    with pytest.raises(UserError, match=r"failed on sample 7: OSError: unreadable \(test_dataset.py:\d+"):
        dataset.read(np.arange(20))
    with pytest.raises(UserError, match=r"x float32\[4\] for sample 9 where x float32\[3\] was expected"):
        dataset.read(np.array([8, 9]))


def test_what_has_no_random_access_is_refused():
    pair = torch.utils.data.TensorDataset(torch.from_numpy(X))

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([1])

    for source, what in ((torch.utils.data.DataLoader(pair), "DataLoader"), (Stream(), "no random access")):
        with pytest.raises(UserError, match=what):
            open_dataset(source)
