"""What the benchmark of convergence makes of its runs."""

import pytest

from benchmarks.convergence import APART, EVERY, FROM_APART, Row, draw, summaries, table


def test_what_is_lost_is_a_share_of_what_communicating_gives(tmp_path):
    losses = {EVERY: (1.0, 2.0), APART: (3.0, 4.0), FROM_APART: (2.0, 3.0), "fp16": (1.1, 2.3)}
    rows = [
        Row(name, seed, 2, loss, 100.0 if name == EVERY else 25.0, 1.0, [(1, loss, 0.0, 0.5), (2, loss, 1e6, 1.0)])
        for name, of_seeds in losses.items()
        for seed, loss in enumerate(of_seeds)
    ]
    found = {one.method: one for one in summaries(rows, list(losses))}
    assert (found[EVERY].lost, found[APART].lost, found[FROM_APART].lost_after) == (0, 1, 1)
    fp16 = found["fp16"]
    assert (fp16.lost, fp16.lost_after, fp16.bytes_share) == pytest.approx((0.1, 0.2, 0.25))
    assert fp16.spread == pytest.approx(0.2 / 2**0.5), "of differences between runs of one seed"
    assert "fp16" in table(list(found.values()))
    draw(rows, list(losses), tmp_path / "curves.svg")
    drawn = (tmp_path / "curves.svg").read_text()
    assert all(f">{label}</text>" in drawn for label in [*losses, "updates", "MB sent by a rank"])
