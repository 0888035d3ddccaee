"""``benchmarks.straggler.published`` on generated files in the format of the published ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks.straggler.published import judged, read_job
from hpctrain.errors import UserError
from hpctrain.monitor.chief.finding import Kind

pyarrow = pytest.importorskip("pyarrow")
DATA, STAGES, STEPS = 4, 2, 40
SECONDS = {"forward-compute": 0.2, "backward-compute": 0.4, "optimizer": 0.05, "grads-reduce-scatter": 3.0}


def write(folder: Path, slow_data: int | None, slow_stage: int, share: float) -> None:
    """A worker, or a stage on all data ranks, is slow by half; ``share`` is the published share of workers."""
    from pyarrow import parquet

    rng = np.random.default_rng(0)
    rows = []
    for step in range(0, 2 * STEPS, 2):
        for data in range(DATA):
            for stage in range(STAGES):
                factor = 1.5 if stage == slow_stage and slow_data in (None, data) else 1.0
                for optype, seconds in SECONDS.items():
                    for micro_batch in range(2 if optype.endswith("compute") else 1):
                        duration = seconds * factor * rng.normal(1, 0.01)
                        rows.append(
                            {
                                "dp_rank": data,
                                "stage": stage,
                                "rank": data * STAGES + stage,
                                "step": step,
                                "optype": optype,
                                "start_ts": 0.0,
                                "duration": duration,
                                "mb_id": micro_batch,
                            }
                        )
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "trace-X.parquet")
    sizes = {"trial_name": "X", "dp_size": DATA, "pp_size": STAGES, "tp_size": 4, "world_size": DATA * STAGES * 4}
    (folder / "meta-X.yaml").write_text(yaml.safe_dump(sizes))
    result = {
        "blocking_decompose_by_dp_rank": {str(data): 1.4 if slow_data in (None, data) else 1.0 for data in range(DATA)},
        "blocking_decompose_by_stage": {str(stage): 1.4 if stage == slow_stage else 1.0 for stage in range(STAGES)},
    }
    (folder / "result-X.json").write_text(json.dumps(result))
    (folder / "mw-X.json").write_text(json.dumps({"Mw": share}))


def test_a_slow_worker_is_named_as_the_analysis_does(tmp_path):
    write(tmp_path, slow_data=2, slow_stage=1, share=1.0)
    job = read_job(tmp_path, "X")
    assert job.slow == {1 * DATA + 2}
    assert judged(job, 8)[0] == job.slow


def test_a_slow_stage_is_a_matter_of_the_plan(tmp_path):
    write(tmp_path, slow_data=None, slow_stage=1, share=0.1)
    job = read_job(tmp_path, "X")
    assert job.slow == frozenset()
    assert judged(job, 8) == (frozenset(), [Kind.PLAN])


def test_a_worker_s_own_time_is_that_of_its_computation(tmp_path):
    write(tmp_path, slow_data=2, slow_stage=1, share=1.0)
    busy = read_job(tmp_path, "X").trace.busy()
    assert busy.shape == (DATA * STAGES, STEPS)
    np.testing.assert_allclose(np.median(busy[0]), 1.25, rtol=0.02)  # noise of 1% in each operation


def test_a_folder_of_another_kind_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no meta-X\.yaml"):
        read_job(tmp_path, "X")
