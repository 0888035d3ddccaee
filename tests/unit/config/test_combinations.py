"""The table of what does not go together, as data. Real runs: tests/unit/rank/test_features.py."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.config.combinations import TABLE, Refused, Row, clash, refuse, stated
from hpctrain.config.features import TRAITS, Feature, Trait
from hpctrain.config.sections import PARTS
from tests.support.docs_tables import combination_tables

PACKAGE = Path(__file__).parents[3] / "hpctrain"
ROWS = pytest.mark.parametrize("row", TABLE, ids=lambda row: "-".join(one.name for one in row.features))


def choices(row: Row) -> Iterator[tuple[Feature, ...]]:
    """Features that a row holds for: of each trait one that has it."""
    having = [[one for one in TRAITS if has in TRAITS[one]] if has in Trait else [has] for has in row.features]
    for chosen in itertools.product(*having):
        yield tuple(map(Feature, chosen))


@ROWS
def test_a_row_is_the_one_that_refuses_its_features(row):
    """No row before it says more than it, so that it is reached, and its sentence has all that it needs."""
    for features in choices(row):
        uses = {feature: f"<{feature.name}>" for feature in features}
        assert clash(uses) is row
        with pytest.raises(Refused) as raised:
            refuse(uses)
        refused = raised.value
        for number, (feature, own) in enumerate(zip(row.features, uses.items(), strict=True)):
            told = stated(*own) if feature in Trait else own[1]
            assert (told in refused.what) == (f"{{{number}" in row.what)
        assert refused.row is row and refused.fix == row.fix
        for left in itertools.combinations(features, len(features) - 1):
            assert clash(dict.fromkeys(left, True)) is None, "nothing is refused that goes together"


@ROWS
def test_a_row_reads_as_two_sentences(row):
    assert all(text.strip() == text and text and not text.endswith(".") for text in (row.what, row.fix))
    assert "{" not in re.sub(r"\{\d(!r)?\}", "", row.what), "is formatted with the features' values, by number"
    assert len(row.features) > 1 and len(set(row.features)) == len(row.features)


def test_no_row_stands_twice():
    every = [frozenset(features) for row in TABLE for features in choices(row)]
    assert len(every) == len(set(every))


def test_every_feature_is_in_a_row_and_is_reported_by_someone():
    """The rooms report features by name, in files that have no rows; keys of the run file report themselves."""
    named = {feature for row in TABLE for features in choices(row) for feature in features}
    assert set(Feature) - named == set() and set(TRAITS) <= named
    assert {trait for row in TABLE for trait in row.features if trait in Trait} == set(Trait)
    sources = [path for path in PACKAGE.rglob("*.py") if path.name != "features.py" and path.parent.name != "refusals"]
    reported = {name for path in sources for name in re.findall(r"\bFeature\.([A-Z_\d]+)", path.read_text("utf-8"))}
    assert reported | {one.name for one in Feature if one.partition(".")[0] in PARTS} == set(Feature.__members__)


def test_the_page_is_in_step():
    written = (PACKAGE.parent / "docs" / "combinations.md").read_text(encoding="utf-8")
    assert combination_tables() in written, "python -m tests.support.docs_tables combinations prints the tables"


SHARDED = "SHARD SHARD_GRADIENTS SHARD_PARAMETERS"
FEWER_BYTES = [
    ("FP16_SUMS OVERLAP", "CLIP ACCUMULATE EMA RECOMPUTE BF16 FP16 TENSOR PIPELINE VERIFY", SHARDED),
    ("BF16_SUMS OVERLAP", "CLIP ACCUMULATE EMA RECOMPUTE BF16 FP16 TENSOR PIPELINE VERIFY", SHARDED),
    (
        "LOCAL_SYNC",
        "CLIP ACCUMULATE RECOMPUTE BF16 FP16_SUMS OVERLAP",
        f"{SHARDED} TENSOR PIPELINE FP16 EMA",
    ),
]


@pytest.mark.parametrize(("used", "fit", "refused"), FEWER_BYTES)
def test_each_way_to_send_fewer_bytes_goes_with_the_rest_or_says_why_not(used, fit, refused):
    """Those that fit train in tests/dist/programs/torch_training.py."""
    uses = {Feature[name]: True for name in [*used.split(), "RANKS"]}
    assert [name for name in fit.split() if clash(uses | {Feature[name]: True})] == []
    for name in refused.split():
        row = clash(uses | {Feature[name]: True})
        assert row is not None and row.fix, name


def test_a_trait_is_told_by_the_first_feature_that_has_it():
    both = {Feature.PIPELINE: 3, Feature.TENSOR: 2, Feature.JOINT_LAYERS: "norm"}
    with pytest.raises(Refused, match=r"parallel.tensor is 2, and norm normalises over the samples of all ranks"):
        refuse(both)
    assert stated(Feature.EARLY_STOP, "loss") == "train.early_stop.metric is 'loss'"
    assert stated(Feature.COMPILE, True) == "train.compile is true"
    assert stated(Feature.OVERLAP, True) == "reduce.overlap is on"
    assert stated(Feature.RATE_HOOK, "Halved") == "the task has a RateHook"


def test_a_login_node_without_frameworks_has_the_whole_table():
    program = (
        "import sys; from hpctrain.config import combinations\n"
        "combinations.TABLE\n"
        "print(*sorted({'torch', 'tensorflow', 'keras', 'horovod', 'mpi4py', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""
