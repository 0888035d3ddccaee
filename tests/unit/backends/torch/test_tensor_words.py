"""Words for cut layers."""

from hpctrain import ColwiseParallel, RowwiseParallel, columns, rows


def test_the_names_of_dtensor_mean_the_same():
    assert ColwiseParallel(heads=4) == columns(heads=4)
    assert ColwiseParallel() == columns
    assert RowwiseParallel() is RowwiseParallel is rows
