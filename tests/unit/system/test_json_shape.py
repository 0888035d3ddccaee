"""Values that are not what their readers take them for."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.system.json_shape import fits, is_count, is_time, misfit, typed, without_misfits

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("shape", "right", "wrong"),
    [
        (int, [0, -3, 2**62], [True, 1.0, 2**63, "1", None, [1]]),
        (float, [0, 1.5, -2], [True, INF, NAN, 10**400, "1.0", None]),
        (is_count, [0, 5], [-1, 0.5, True]),
        (is_time, [0, 1.7e9], [-1, 1e12, NAN, "noon"]),
        (str, ["", "x"], [1, None, ["x"]]),
        (bool, [True, False], [0, 1, None]),
        ((str, None), ["x", None], [0, []]),
        ([str], [[], ["x", "y"]], ["x", ["x", 1], {"x": "y"}, None]),
        ({str: float}, [{}, {"a": 1.0}], [{"a": "b"}, [], None]),
        ({"a": int, "b": ([str], None)}, [{}, {"a": 1}, {"a": 1, "b": None, "c": []}], [{"a": "1"}, {"b": [1]}, []]),
        (dict, [{}, {"x": 1}], [[], None, "x"]),
    ],
)
def test_shapes(shape: Any, right: list[Any], wrong: list[Any]) -> None:
    fit = fits(shape)
    assert all(map(fit, right)) and not any(map(fit, wrong))
    assert [typed(shape)(value) for value in right] == right


def test_the_misfit_is_named_or_left_out() -> None:
    shape = {"step": is_count, "by": str}
    assert misfit(shape)({"step": 3, "by": 7, "more": []}) == "by"
    assert misfit(shape)({"step": 3}) is None
    assert without_misfits(shape)({"step": 3, "by": 7, "more": []}) == {"step": 3, "more": []}
