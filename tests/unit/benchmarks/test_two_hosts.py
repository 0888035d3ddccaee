"""What ``benchmarks.two_hosts`` says of times and bytes."""

import pytest

from benchmarks.two_hosts import bits_per_s, judged, table


def test_rates_are_those_of_tc():
    assert [bits_per_s(rate) for rate in ("1gbit", "200mbit", "2.5gbit")] == [1e9, 200e6, 2.5e9]


@pytest.mark.parametrize(
    ("contender", "choice", "bound_s"),
    [
        ("mpi-overlap-fp16", None, 1 + 8 * 2e6 * 2 / 8e6 + 2),  # the wire takes 4 s, backward 3 s
        ("mpi-pieces", None, 1 + 8 + 2),
        ("auto", "mpi-flat-fp16", 1 + 4 + 2),
        ("none", None, None),
    ],
)
def test_a_row_is_compared_with_what_the_link_allows(contender, choice, bound_s):
    measured = {"contender": contender, "seconds": 14.0, "sent_bytes": 4e6, "weights_equal": True, "choice": choice}
    peer = {**measured, "contender": "ddp-fp16", "seconds": 28.0, "choice": None}
    rows = judged("mlp", {"phases_s": [1.0, 3.0, 2.0], "values": 2e6, "rows": [measured, peer]}, 8e6)
    assert rows[0]["bound_s"] == bound_s
    assert rows[0]["to_bound"] == (bound_s and 14 / bound_s)
    assert rows[0]["to_peer"] == 0.5
    assert len(table(rows).splitlines()) == 3
