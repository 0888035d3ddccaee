"""tf.data pipelines as data."""

from itertools import islice

import numpy as np
import pytest

from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.stream import StreamingData, StreamOrder, is_stream, open_stream
from hpctrain.errors import UserError

tf = pytest.importorskip("tensorflow")
X = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
Y = np.arange(20)


def test_a_finite_pipeline_is_read_by_index():
    dataset = open_dataset(tf.data.Dataset.from_tensor_slices({"x": X, "y": Y}))
    samples = dataset.read(np.array([7, 0]))
    assert np.array_equal(samples["x"], X[[7, 0]]) and samples["y"].tolist() == [7, 0]
    assert list(open_dataset(tf.data.Dataset.from_tensor_slices((X, Y)), ["image", "label"]).fields) == [
        "image",
        "label",
    ]


def test_endless_empty_and_uneven_pipelines_are_refused():
    numbers = tf.data.Dataset.range(5)
    for source, what in (
        (numbers.repeat(), "endless"),
        (numbers.take(0), "no samples"),
        (numbers.batch(2), r"x int64\[1\] for sample 2"),
        (tf.data.Dataset.from_tensor_slices(["a"]), "not a number"),
    ):
        with pytest.raises(UserError, match=what):
            open_dataset(source)


def test_a_pipeline_beyond_memory_is_refused(monkeypatch):
    from hpctrain.data.formats import tf_dataset

    monkeypatch.setattr(tf_dataset, "MEMORY_BYTES", 10)
    with pytest.raises(UserError, match="every rank would hold"):
        open_dataset(tf.data.Dataset.range(5))


def test_samples_that_differ_in_shape():
    source = tf.data.Dataset.range(1, 4).map(lambda n: {"x": tf.range(n), "n": n})
    dataset = open_dataset(source, ragged=True)
    assert dataset.fields["x"].is_ragged and not dataset.fields["n"].is_ragged
    assert [x.tolist() for x in dataset.read(np.arange(3))["x"]] == [[0], [0, 1], [0, 1, 2]]
    with pytest.raises(UserError, match=r"the tf\.data pipeline gives x int64"):
        open_dataset(source)


def test_endless_pipelines_and_those_of_unknown_length_are_streams():
    def ids(stream, number, rank=0, size=1, batch=0):
        data = StreamingData(stream, StreamOrder(3), rank, size)
        try:
            batches = list(islice(data.starting_at(0, batch), number))
        finally:
            data.close()
        return [[int(i) for piece in batch.micro_batches for i in piece["id"]] for batch in batches]

    endless = tf.data.Dataset.range(7).repeat().map(lambda n: {"id": n, "x": tf.fill([2], n)})
    assert is_stream(endless) and not is_stream(tf.data.Dataset.range(7))
    whole = ids(open_stream(endless), 9)
    assert [i for batch in whole for i in batch] == [index % 7 for index in range(27)]
    ranks = [ids(open_stream(endless), 5, rank, 2, 4) for rank in range(2)]
    assert [first + second for first, second in zip(*ranks, strict=True)] == whole[4:]
    unknown = tf.data.Dataset.range(9).filter(lambda n: n % 2 == 0)
    assert ids(open_stream(unknown, ["id"]), 3) == [[0, 2, 4], [6, 8], [0, 2, 4]]


def test_triples_are_weighted_samples():
    triples = tf.data.Dataset.from_tensor_slices((np.zeros((6, 2)), np.ones(6), np.arange(6.0)))
    assert list(open_dataset(triples).fields) == ["x", "y", "sample_weight"]
    assert list(open_stream(triples.repeat()).fields) == ["x", "y", "sample_weight"]
    with pytest.raises(UserError, match="has 3 parts, for which there are 2 names"):
        open_dataset(triples, fields=("x", "y"))
