"""When a rank writes the collectives that it waits in."""

import json
import threading

import pytest

from hpctrain.backends.torch import collective_watch
from hpctrain.config.sections import MonitorConfig
from hpctrain.monitor.ring_clock import RingClock
from hpctrain.run.folder import RunDir
from hpctrain.train.clock import Phase
from tests.support.command import wait_for

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("retired", "is_written"), [(False, True), (True, False)])
@pytest.mark.parametrize("recorder", collective_watch.RECORDERS)
def test_a_silent_rank_writes_what_it_waits_in(tmp_path, monkeypatch, recorder, retired, is_written):
    asked = threading.Event()

    def dump(**_):
        asked.set()
        return json.dumps({"entries": [{"retired": retired}, {"retired": True}], "pg_config": {"data": {}}}).encode()

    for name in collective_watch.RECORDERS:  # a torch for GPUs has both; gloo's knows nothing of NCCL's collectives
        monkeypatch.setattr(collective_watch.c10d, name, lambda **_: b'{"pg_config": {}}', raising=False)
    monkeypatch.setattr(collective_watch.c10d, recorder, dump)
    monkeypatch.setattr(collective_watch.os, "environ", environment := {})
    run = RunDir(tmp_path)
    run.monitor.mkdir()
    clock = RingClock()
    clock.mark(Phase.BACKWARD)
    watch = collective_watch.watch_collectives(clock, run, 3, MonitorConfig(hang_s=0.2))
    wait_for("the dump", asked.is_set)
    watch.close()
    written = list(run.monitor.iterdir())
    assert [path.name for path in written] == (["collectives-1-3.json"] if is_written else [])
    sizes = {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}
    assert {name for name, value in environment.items() if value == collective_watch.RECORDED} == sizes
    expected = {"entries": [{"retired": False}], "pg_config": {"data": {}}}
    assert not written or json.loads(written[0].read_bytes()) == expected
