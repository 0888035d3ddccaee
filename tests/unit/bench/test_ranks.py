"""Programs of benchmarks that do not give what they should."""

import pytest

from hpctrain.bench import ranks
from hpctrain.errors import ExitCode, RunFailed


def test_a_program_that_does_not_end_is_a_clear_error(monkeypatch):
    monkeypatch.setattr(ranks, "TIMEOUT_S", 0.01)
    with pytest.raises(RunFailed, match="timeit did not end within"):
        ranks.on_ranks("timeit", {}, 1)


@pytest.mark.parametrize("benchmark", ["data", "checkpoint"])
def test_a_folder_that_is_not_there_is_a_clear_error(benchmark, cli):
    assert (
        "--folder /nowhere is not a folder"
        in cli("bench", benchmark, "--folder", "/nowhere", code=ExitCode.USER_ERROR).err
    )
