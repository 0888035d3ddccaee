"""Random reads of small samples, and prefetch that hides them; both sides are measured in the same run."""

import json

from hpctrain.cli import main


def test_random_samples_are_fast_and_their_reading_is_hidden(capsys):
    assert main(["bench", "data", "--json", "--rounds", "3"]) == 0
    measured = json.loads(capsys.readouterr().out)
    rows = {row["reader"]: row for row in measured["rows"]}
    assert rows["hpctrain"]["ratio_to_h5py"] >= 10
    waits = {wait["prefetch"]: wait for wait in measured["waits"]}
    assert waits[2]["wait_share"] < 0.02
    assert waits[2]["wait_ms"] < waits[0]["wait_ms"]
