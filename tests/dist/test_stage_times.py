"""Stages are balanced by time, not by parameters, and a resumed run keeps them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from hpctrain.run.events import RunStarted
from hpctrain.run.run_view import RunView
from tests.support.mpi import printed
from tests.tasks import uneven_stages

pytestmark = pytest.mark.world_size(2)
Launched = Callable[[], tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Folder of all runs, and their results; launched once."""

    @functools.cache
    def launched() -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("uneven")
        return folder, printed(2, "stage_times.py", folder, warm="torch")

    return launched


def layers(folder: Path, name: str) -> list[tuple[int, ...]]:
    """Number of layers of each stage, for each attempt of a run."""
    return [event.layers for event in RunView(folder / name).history().all(RunStarted)]


def test_stages_are_cut_where_their_times_are_equal(found):
    """The first layer takes longer than all others together; all have equal numbers of parameters."""
    folder, _ = found()
    assert layers(folder, "timed") == [(1, uneven_stages.LAYERS - 1)]
    noted = json.loads((folder / "timed" / "run.json").read_text())["stages"]
    assert noted["layers"] == [1, uneven_stages.LAYERS - 1] and noted["pipeline"] == 2
    assert noted["seconds"][0] >= uneven_stages.PAUSE_S > 5 * max(noted["seconds"][1:])


def test_what_was_timed_trains_as_one_process_does(found):
    """Each layer runs twice per update, and its counter contains nothing else, such as the timing."""
    _, results = found()
    model, samples = uneven_stages.chain(slow=-1), uneven_stages.data()
    optimizer = uneven_stages.optimizer_of(model)
    losses = []
    for _ in range(4):
        loss = functional.mse_loss(model(torch.from_numpy(samples["x"])), torch.from_numpy(samples["y"]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    np.testing.assert_allclose(results["timed"]["losses"], losses, rtol=0, atol=1e-12)
    first, second = results["timed"]["passes"]
    assert first == {"0.passes": 8}
    assert second == {f"{number}.passes": 8 for number in range(1, uneven_stages.LAYERS)}


def test_a_resumed_run_keeps_its_stages_and_their_random_numbers(found):
    """By then another layer is the slow one, as a new run finds."""
    folder, results = found()
    assert layers(folder, "other") == [(uneven_stages.LAYERS - 1, 1)]
    assert layers(folder, "again") == [(1, uneven_stages.LAYERS - 1)] * 2
    assert results["begun"]["losses"] + results["ended"]["losses"] == results["noisy"]["losses"]


def test_a_task_says_which_layers_each_stage_has(found):
    folder, results = found()
    assert layers(folder, "given") == [(4, 2)]
    np.testing.assert_allclose(results["given"]["losses"], results["timed"]["losses"], rtol=0, atol=1e-12)
    assert "stages" not in json.loads((folder / "given" / "run.json").read_text())
    said = "layers= of the task gives the layers of 3 stages, and parallel.pipeline is 2"
    assert said in results["three"]["error"]


def test_operations_of_all_stages_are_counted(found):
    """Matrix-vector products in each layer: forward, plus twice as much backward; averaged over both stages."""
    folder, _ = found()
    data = RunView(folder / "timed").history()
    started = data.last(RunStarted)
    assert started is not None and started.peak_flops_per_s is not None
    assert started.flops_per_sample == 3 * uneven_stages.LAYERS * 2 * uneven_stages.WIDTH**2 / 2
    rates, used = data.train["samples_per_s"].value, data.train["mfu"].value
    assert len(used) == 2
    assert used == pytest.approx(rates * started.flops_per_sample / started.peak_flops_per_s, rel=1e-9)
