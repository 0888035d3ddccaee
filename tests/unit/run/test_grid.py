"""Ranks and their places."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.run.grid import Grid, GridPlace, grid_of


@given(tensor=st.integers(1, 4), data=st.integers(1, 4), pipeline=st.integers(1, 4))
def test_tensor_index_varies_fastest_then_data_then_stage(tensor, data, pipeline):
    grid = Grid(tensor * data * pipeline, tensor, pipeline)
    wanted = [GridPlace(d, t, s) for s in range(pipeline) for d in range(data) for t in range(tensor)]
    assert [grid.place(rank) for rank in range(grid.ranks)] == wanted
    assert grid.data == data


@pytest.mark.parametrize(
    ("grid", "rank", "told", "name"),
    [
        (Grid(4), 3, "", ""),
        (Grid(4, tensor=2), 3, " (data 1, tensor 1)", "tensor 2 x data 2"),
        (Grid(8, tensor=2, pipeline=2), 5, " (stage 1, data 0, tensor 1)", "tensor 2 x data 2 x pipeline 2"),
        (Grid(2, pipeline=2), 1, " (stage 1, data 0)", "data 1 x pipeline 2"),
    ],
)
def test_what_people_read(grid, rank, told, name):
    assert grid.label(rank) == told
    assert str(grid) == name


@pytest.mark.parametrize("said", [(None, None), (3, None), (2, 3), (8, 1), (0, 0), (-2, 1)])
def test_a_file_that_says_nonsense_has_no_places(said):
    assert grid_of(4, *said) == Grid(4)
