"""PyTorch on 1, 2 and 4 real MPI ranks trains as one process does, with each reducer; ranks are bitwise identical."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from tests.support.mpi import printed

WAYS = ("mpi-node", "mpi-flat", "mpi-overlap", "horovod-flat", "horovod-overlap", "gloo-flat", "gloo-overlap")
REDUCERS = {1: ("auto",), 2: ("auto", "mpi", "horovod", "nccl", *WAYS), 4: WAYS}
"""Reducers to try, by number of ranks: on four each way that the names of others stand for, on one there is none."""
BY_MPI = ("accumulate", "clip", "weighted")
OPTIONS = {1: BY_MPI, 2: (*BY_MPI, *(f"{option}-gloo" for option in BY_MPI)), 4: BY_MPI}
"""Options whose results must not depend on the number of ranks, either."""
OWN_STEPS = ("own", "own-pairs", "own-rows")
"""Tasks with a custom ``step``."""
ELSEWHERE = (
    "fp16-wire", "bf16-wire", "fp16-horovod", "bf16", "fp16", "sparse", "dense", "refused", "sabotaged", "not_finite",
    "evaluated", "judged", "noises", "overflowing", "interrupted", "rehearsed", "watched",
    "frozen", "fp16-gloo", "bf16-gloo", "not_finite-gloo", "overflowing-gloo", "interrupted-gloo", "compiled",
)  # fmt: skip
OWN_ELSEWHERE = ("own-horovod", "own-gloo", "own-accumulate", "own-weighted", "own-apart", "own-overflow", "own-joined")

pytestmark = pytest.mark.world_size(4)


def run(program: str, ranks: int, *arguments: str) -> Any:
    """Run a program, and return the JSON it prints."""
    return printed(ranks, program, *arguments, warm="torch")


@functools.cache
def results(ranks: int) -> dict[str, Any]:
    """Results of all scenarios on this number of ranks, run once."""
    more = {
        1: ("evaluated", "judged", "spectral"),
        2: (*ELSEWHERE, "spectral", "tables-gloo"),
        4: ("judged", "tables-gloo"),
    }[ranks]
    found: dict[str, Any] = run(
        "torch_training.py", ranks, *REDUCERS[ranks], *OPTIONS[ranks], "joined", "tables", *more
    )
    return found


@functools.cache
def own_results(ranks: int) -> dict[str, Any]:
    """Results of tasks with a custom ``step``."""
    more = {1: ("own-joined",), 2: OWN_ELSEWHERE, 4: ()}[ranks]
    found: dict[str, Any] = run("torch_training.py", ranks, *OWN_STEPS, *more)
    return found


@functools.cache
def by_hand(kind: str = "mean") -> list[float]:
    """Losses of the handwritten loop."""
    found: list[float] = run("torch_plain_loop.py", 1, kind)
    return found


def require_same_training(losses: list[float], wanted: list[float], rtol: float = 1e-4, atol: float = 0) -> None:
    """Check that loss curves agree."""
    np.testing.assert_allclose(losses, wanted, rtol=rtol, atol=atol)


def require_equal_ranks(found: dict[str, Any]) -> None:
    """Check that weights are bitwise identical on all ranks, and that sums of all other replicated state match."""
    assert len(set(found["hashes"])) == 1
    assert all(sums == found["replicated"][0] for sums in found["replicated"])


@pytest.mark.parametrize(("ranks", "reducer"), [(ranks, name) for ranks in REDUCERS for name in REDUCERS[ranks]])
def test_ranks_train_as_a_plain_loop_does(ranks, reducer):
    found = results(ranks)[reducer]
    assert len(found["losses"]) == 50
    require_same_training(found["losses"], by_hand())
    require_equal_ranks(found)
    if ranks > 1 and "-" in reducer:
        assert found["reducer"] == reducer
    if ranks > 1 and reducer == "nccl":
        assert found["reducer"] == "gloo-overlap"


def test_two_ranks_sum_to_the_bits_of_shared_memory_by_each_exact_reducer():
    found = results(2)
    wanted = found["mpi-node"]["hashes"]
    assert all(found[reducer]["hashes"] == wanted for reducer in REDUCERS[2])


@pytest.mark.parametrize(("ranks", "option"), [(ranks, name) for ranks in OPTIONS for name in OPTIONS[ranks]])
def test_accumulation_clipping_and_weights_are_exact(ranks, option):
    found = results(ranks)[option]
    require_same_training(found["losses"], by_hand(option.partition("-")[0].replace("accumulate", "mean")))
    require_equal_ranks(found)


@pytest.mark.parametrize("plan", ["mpi-overlap", "horovod-flat", "gloo-overlap", "optimizer"])
def test_complex_parameters_train_as_on_one_rank(plan):
    found, wanted = results(2)["spectral"][plan], results(1)["spectral"][plan]
    require_same_training(found["losses"], wanted["losses"], rtol=1e-12)  # fp64, another order of sums
    require_equal_ranks(found)


@pytest.mark.parametrize("ranks", [2, 4])
def test_batchnorm_over_all_ranks_is_that_of_one_process(ranks):
    found, wanted = results(ranks)["joined"], results(1)["joined"]
    require_same_training(found["losses"], wanted["losses"], rtol=1e-9)
    require_equal_ranks(found)
    assert len(set(found["uneven"])) == len(set(found["loaded"])) == 1
    assert {found["placed"][f"model/{name}"] for name in ("1.running_mean", "5.num_batches_tracked")} == {"replicated"}
    totals = [sum(part["loss"][0] for rank in each["evaluated"] for part in rank) for each in (found, wanted)]
    np.testing.assert_allclose(*totals, rtol=1e-9)


@pytest.mark.parametrize("plan", ["overlap", "device", "recompute", "optimizer", "parameters"])
def test_layers_compiled_one_by_one_train_as_eager_ones(plan):
    found = results(2)["compiled"]
    assert found[f"{plan} True layers"] == 2
    require_same_training(found[f"{plan} True"], found[f"{plan} False"], rtol=1e-5)  # fp32, another order of sums


@pytest.mark.tour
@pytest.mark.parametrize(
    ("ranks", "scenario", "kind"),
    [
        *((ranks, "own", "gan") for ranks in (1, 2, 4)),
        *((ranks, scenario, "pairs") for ranks in (1, 2, 4) for scenario in ("own-pairs", "own-rows")),
        *((2, scenario, "gan") for scenario in ("own-horovod", "own-gloo", "own-accumulate")),
        (2, "own-weighted", "weighted"),
    ],
)
def test_own_steps_do_what_a_loop_written_by_hand_does(ranks, scenario, kind):
    from tests.tasks import torch_own_steps as own  # takes seconds

    found = own_results(ranks)[scenario]
    wanted = {
        "gan": lambda: own.plain(own.plain_gan, own.gan, 8),
        "pairs": lambda: own.plain(own.plain_pairs, lambda: own.one(own.whole_step), 8),
        "weighted": lambda: own.plain(own.plain_weighted, lambda: own.one(own.weighted_step), 8),
    }[kind]()
    np.testing.assert_allclose(found["weights"], wanted, rtol=1e-12, atol=1e-12)
    assert len(set(found["hashes"])) == 1


@pytest.mark.tour
def test_batchnorm_over_all_ranks_in_own_steps_is_that_of_one_process():
    found, wanted = own_results(2)["own-joined"], own_results(1)["own-joined"]
    np.testing.assert_allclose(found["weights"], wanted["weights"], rtol=1e-9, atol=1e-12)
    assert len(set(found["hashes"])) == len(set(found["pieces"])) == 1
    np.testing.assert_allclose(found["own"], found["plain"], rtol=1e-12, atol=1e-12)


@pytest.mark.tour
def test_ranks_whose_steps_differ_say_so_and_do_not_hang():
    for said in own_results(2)["own-apart"]["said"]:
        assert said == [
            "the ranks' steps differ: rank 0 ends its step, and rank 1 calls ctx.update()",
            "the ranks' steps differ: rank 0 calls ctx.update(), and rank 1 calls ctx.gather",
            "the ranks' steps differ: rank 0 ends its step, and rank 1 passes gradients back through ctx.gather",
            "the ranks' steps differ: rank 0 ends its step, and rank 1 runs a BatchNorm layer",
        ]


@pytest.mark.tour
def test_an_overflow_leaves_out_the_update_of_its_optimizer_on_all_ranks():
    assert own_results(2)["own-overflow"]["moved"] == [[True, False], [True, False]]


def test_clipping_and_weights_matter():
    for kind in ("clip", "weighted"):
        with pytest.raises(AssertionError):
            require_same_training(by_hand(kind), by_hand())


def test_a_hook_of_the_optimizer_on_one_rank_changes_nothing():
    found = results(2)["watched"]
    require_same_training(found["losses"], by_hand())
    require_equal_ranks(found)
    assert found["seen"] == [[], [True] * 50]


def test_layers_that_are_frozen_at_times_train_as_in_one_process():
    found = results(2)["frozen"]["differences"]
    assert found and max(value for differences in found for value in differences.values()) < 1e-5, found


def test_without_the_exchange_these_tests_fail():
    found = results(2)["sabotaged"]
    with pytest.raises(AssertionError):
        require_equal_ranks(found)
    with pytest.raises(AssertionError):
        require_same_training(found["losses"], by_hand())


@pytest.mark.parametrize(
    ("scenario", "rtol"),
    [
        ("fp16-wire", 0.01),
        ("fp16-horovod", 0.01),
        ("fp16-gloo", 0.01),
        ("bf16-wire", 0.05),
        ("bf16-gloo", 0.05),
        ("bf16", 0.05),
        ("fp16", 0.02),
    ],
)
def test_low_precision_stays_near_and_ranks_stay_equal(scenario, rtol):
    found = results(2)[scenario]
    require_same_training(found["losses"], by_hand(), rtol, atol=0.005)
    with pytest.raises(AssertionError):
        require_same_training(found["losses"], by_hand(), 1e-7)
    require_equal_ranks(found)


def test_sparse_gradients_become_dense_or_are_refused():
    found = results(2)
    require_same_training(found["sparse"]["losses"], found["dense"]["losses"], 1e-6)
    require_equal_ranks(found["sparse"])
    assert "embedding.weight is sparse" in found["refused"]["error"]
    assert "fix:" in found["refused"]["error"]


@pytest.mark.parametrize("scenario", ["tables", "tables-gloo"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_of_embeddings_travel_alone_and_train_as_whole_tables_do(ranks, scenario):
    """The seventh of nine batches has three samples, so that the last of four ranks has none."""
    found, one = results(ranks)[scenario], results(1)["tables"]
    assert len(found) == 10
    for name, run_ in found.items():
        require_same_training(run_["losses"], one[name]["losses"], 1e-5)
        require_equal_ranks(run_)
        np.testing.assert_allclose(run_["replicated"][0], one[name]["replicated"][0], rtol=1e-4, atol=1e-5)
        whole = found.get(name.replace("auto", "densify"), run_)
        require_same_training(run_["losses"], whole["losses"], 1e-6)


@pytest.mark.parametrize("scenario", ["not_finite", "not_finite-gloo"])
def test_a_loss_that_is_not_finite_stops_all_ranks_before_the_update(scenario):
    found = results(2)[scenario]
    assert found["ranks"] == [[1], [1]]
    assert found["unchanged"] == [True, True]


@pytest.mark.parametrize("scenario", ["overflowing", "overflowing-gloo"])
def test_an_overflow_skips_the_update_on_all_ranks(scenario):
    assert results(2)[scenario]["after"] == [[True, 0.5], [True, 0.5]]


@pytest.mark.parametrize("scenario", ["interrupted", "interrupted-gloo"])
def test_state_by_name_resumes_bit_for_bit(scenario):
    assert results(2)[scenario]["same"] == [True, True]


def test_evaluation_does_not_depend_on_the_number_of_ranks():
    one, two = results(1)["evaluated"], results(2)["evaluated"]

    def means(found):
        parts = [part for rank in found["sums"] for part in rank]
        return {
            name: sum(part[name][0] for part in parts) / sum(part[name][1] for part in parts)
            for name in ("loss", "accuracy")
        }

    assert means(one) == pytest.approx(means(two), rel=1e-5)
    np.testing.assert_allclose(one["outputs"], two["outputs"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_metrics_say_what_they_say_of_all_samples_at_once(ranks):
    from sklearn.metrics import f1_score, roc_auc_score  # takes seconds

    found = results(ranks)["judged"]
    classes = np.array(found["classes"])
    (said, *others), outputs = found["metrics"], np.array(found["outputs"], np.float32)
    assert all(other == said for other in others)
    assert said["auc"] == pytest.approx(roc_auc_score(classes == 0, outputs[:, 0]), rel=1e-6)
    assert said["f1"] == pytest.approx(f1_score(classes, outputs.argmax(1), average="macro"), rel=1e-6)
    assert said["hits/share"] == pytest.approx((outputs.argmax(1) == classes).mean())
    assert said["median"] == np.sort(outputs, axis=None)[(outputs.size - 1) // 2]
    assert {"hard/auc", "hard/f1", "hard/loss"} <= set(said)
    assert found["figures"] == ["confusion", "hard/confusion"]


def test_noise_and_statistics_are_each_ranks_own():
    found = results(2)["noises"]
    first, second = found["drawn"]
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert found["placed"]["model/1.running_mean"] == "rank"
    assert found["placed"]["rng/torch"] == "rank"
    assert found["placed"]["model/0.weight"] == "replicated"


def test_measuring_leaves_no_trace():
    found = results(2)["rehearsed"]
    assert found["losses"][0] == found["losses"][1]
    assert {"mpi-node", "horovod-flat", "horovod-overlap"} == set(found["measured"])
