"""Keras on 1, 2 and 4 real MPI ranks trains as one process does, with each reducer; ranks are bitwise identical."""

from __future__ import annotations

import functools
from typing import Any

import h5py
import numpy as np
import pytest

from tests.support.command import hpctrain, last_words, write_run
from tests.support.mpi import ROOT, mpirun, printed

EVERYWHERE = ("accumulate", "clip", "weighted", "evaluated", "judged", "joined")
"""Scenarios whose results must not depend on the number of ranks."""
REDUCERS = {1: ("auto",), 2: ("auto", "mpi", "horovod"), 4: ("mpi", "horovod")}
"""Reducers to try, by number of ranks; one rank has none."""
ELSEWHERE = ("fp16-wire", "bf16-wire", "bf16", "fp16", "not_finite", "noises", "sabotaged")


def run(program: str, ranks: int, *arguments: str) -> Any:
    """Run a program, and return the JSON it prints."""
    return printed(ranks, program, *arguments, warm="tensorflow")


@functools.cache
def results(ranks: int) -> dict[str, Any]:
    """Results of all scenarios on this number of ranks, run once."""
    more = {1: ("tables", "wide"), 2: (*ELSEWHERE, "tables", "wide")}.get(ranks, ())
    found: dict[str, Any] = run("tensorflow_training.py", ranks, *REDUCERS[ranks], *EVERYWHERE, *more)
    return found


@functools.cache
def by_hand() -> list[float]:
    """Losses of the handwritten loop."""
    found: list[float] = run("tensorflow_plain_loop.py", 1)
    return found


def require_same_training(losses: list[float], wanted: list[float]) -> None:
    """Check that loss curves agree to 1e-4."""
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)


@pytest.mark.world_size(4)
@pytest.mark.parametrize(("ranks", "reducer"), [(ranks, name) for ranks in REDUCERS for name in REDUCERS[ranks]])
def test_ranks_train_as_a_plain_loop_does(ranks, reducer):
    found = results(ranks)[reducer]
    assert len(found["losses"]) == 50
    require_same_training(found["losses"], by_hand())
    assert len(set(found["hashes"])) == 1
    assert all(slots == found["slots"][0] for slots in found["slots"])


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("ranks", "scenario"),
    [*((ranks, name) for ranks in (2, 4) for name in ("accumulate", "clip", "weighted")), (2, "wide")],
)
def test_the_number_of_ranks_changes_nothing(ranks, scenario):
    found = results(ranks)[scenario]
    require_same_training(found["losses"], results(1)[scenario]["losses"])
    assert len(set(found["hashes"])) == 1
    assert all(slots == found["slots"][0] for slots in found["slots"])


@pytest.mark.world_size(4)
@pytest.mark.parametrize("ranks", [2, 4])
def test_batchnorm_over_all_ranks_is_that_of_one_process(ranks):
    found, wanted = results(ranks)["joined"], results(1)["joined"]
    np.testing.assert_allclose(found["losses"], wanted["losses"], rtol=1e-9)
    assert len(set(found["hashes"])) == len(set(found["uneven"])) == 1, "moving statistics included"
    totals = [sum(part["loss"][0] for rank in each["evaluated"] for part in rank) for each in (found, wanted)]
    np.testing.assert_allclose(*totals, rtol=1e-9)


@pytest.mark.world_size(2)
def test_rows_of_embeddings_train_as_one_process_does():
    found, one = results(2)["tables"], results(1)["tables"]
    assert list(found) == ["sgd, mpi", "sgd, horovod", "adagrad, mpi", "clipped momentum, mpi", "adam, mpi"]
    for name, run_ in found.items():
        wanted = one[f"{name.partition(',')[0]}, none"]
        assert run_["by rows"] and len(set(run_["hashes"])) == 1 and run_["slots"][0] == run_["slots"][1], name
        np.testing.assert_allclose(run_["losses"], wanted["losses"], rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(run_["weights"], wanted["weights"], rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.world_size(4)
def test_accumulation_is_one_larger_batch_and_clipping_and_weights_are_not():
    found = results(1)
    require_same_training(found["accumulate"]["losses"], by_hand())
    for other in ("clip", "weighted"):
        with pytest.raises(AssertionError):
            require_same_training(found[other]["losses"], by_hand())


@pytest.mark.world_size(2)
def test_without_the_exchange_these_tests_fail():
    found = results(2)["sabotaged"]
    assert len(set(found["hashes"])) == 2
    with pytest.raises(AssertionError):
        require_same_training(found["losses"], by_hand())


@pytest.mark.world_size(2)
@pytest.mark.parametrize("wire", ["fp16-wire", "bf16-wire"])
def test_sixteen_bits_on_the_wire_stay_near_and_equal_on_all_ranks(wire):
    found = results(2)[wire]
    assert len(set(found["hashes"])) == 1
    assert found["losses"] != results(2)["mpi"]["losses"]
    np.testing.assert_allclose(found["losses"], by_hand(), rtol=0.05)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_and_stays_equal_on_all_ranks(precision):
    found = results(2)[precision]
    assert len(set(found["hashes"])) == 1
    assert np.mean(found["losses"][-7:]) < 0.6 * np.mean(found["losses"][:7])


@pytest.mark.world_size(2)
def test_a_loss_that_is_not_finite_is_raised_on_all_ranks_and_names_the_one_at_fault():
    found = results(2)["not_finite"]
    assert found == {"ranks": [[1], [1]], "unchanged": [True, True]}


@pytest.mark.world_size(2)
def test_noise_differs_between_ranks():
    mine, others = results(2)["noises"]["seeds"]
    assert len(mine) == 3
    assert all(one != other for one, other in zip(mine, others, strict=True))


@pytest.mark.world_size(4)
@pytest.mark.parametrize("ranks", [2, 4])
def test_evaluation_and_prediction_do_not_depend_on_the_ranks(ranks):
    found, wanted = results(ranks)["evaluated"], results(1)["evaluated"]
    for name in ("loss", "accuracy"):
        totals = np.sum([part[name] for rank in found["sums"] for part in rank], axis=0)
        np.testing.assert_allclose(totals, wanted["sums"][0][0][name], rtol=1e-5)
    np.testing.assert_allclose(found["outputs"], wanted["outputs"], rtol=1e-3, atol=1e-4)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_metrics_say_what_they_say_of_all_samples_at_once(ranks):
    from sklearn.metrics import f1_score, jaccard_score, precision_score, roc_auc_score  # takes seconds

    found = results(ranks)["judged"]
    classes = np.array(found["classes"])
    (said, *others), outputs = found["metrics"], np.array(found["outputs"], np.float32)
    assert all(other == said for other in others)
    one_hot = np.eye(3)[classes]
    assert [said[f"keras_f1/{label}"] for label in range(3)] == pytest.approx(
        f1_score(classes, outputs.argmax(1), average=None), rel=1e-5
    )
    chances = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
    assert said["keras_auc"] == pytest.approx(roc_auc_score(one_hot.ravel(), chances.ravel()), abs=0.01)
    assert said["iou"] == pytest.approx(jaccard_score(classes, outputs.argmax(1), average="macro"), rel=1e-5)
    weights = np.repeat(found["weights"], 3)
    wanted = precision_score(one_hot.ravel(), chances.ravel() > 0.5, sample_weight=weights)
    assert said["precision"] == pytest.approx(wanted, rel=1e-5)
    assert {"hard/keras_auc", "hard/iou", "hard/loss"} <= set(said)
    for name in ("keras_auc", "iou", "precision"):
        assert said[name] == pytest.approx(results(1)["judged"]["metrics"][0][name], rel=1e-5)


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.world_size(n)) for n in (1, 2)])
def test_a_loop_of_ones_own_in_under_40_lines(ranks):
    program = ROOT / "examples" / "own_loop_keras.py"
    assert len([line for line in program.read_text().splitlines() if line.strip()]) < 40
    result = mpirun(ranks, program, warm="tensorflow")
    said = result.stdout.strip().splitlines()[-1]
    assert said.startswith(f"{ranks} ranks, reducer ")
    assert float(said.rsplit(" ", 1)[1]) < 0.15


@pytest.mark.tour
@pytest.mark.world_size(2)
def test_a_subclassed_transformer_trains_and_is_exported(tmp_path):
    task = f"{ROOT}/tests/tasks/tensorflow_subclassed_task.py:task"
    run = write_run(tmp_path, task=task, train={"steps": 3, "global_batch": 24}, checkpoint={"every_steps": 3})
    hpctrain("run", "-n", 2, run, cwd=tmp_path, warm="tensorflow")
    assert len({word["weights_hash"] for word in last_words(tmp_path / "runs/run")}) == 1
    hpctrain("ckpt", "export", "runs/run", "-o", "model.weights.h5", cwd=tmp_path)
    with h5py.File(tmp_path / "model.weights.h5") as exported:
        assert "attention" in exported and "head" in exported
