"""Phases in a profile of TensorFlow."""

import threading

import pytest

from hpctrain.backends.tensorflow.keras_performance import KerasProfiler
from hpctrain.monitor.ring_clock import RingClock
from hpctrain.rank.phase_ranges import PhaseProfiler
from hpctrain.train.clock import Phase

pytestmark = pytest.mark.slow


def test_a_profile_names_phases_also_of_other_threads(tmp_path):
    """A step's graph marks its phases on TensorFlow's threads."""
    clock = RingClock()
    profiler = PhaseProfiler(KerasProfiler(), clock)
    profiler.start(tmp_path)
    for _ in range(2):
        for phase in (Phase.DATA, Phase.BACKWARD, Phase.EXCHANGE):
            thread = threading.Thread(target=clock.mark, args=(phase,))
            thread.start()
            thread.join()
        clock.end_step()
    profiler.stop()
    [profile] = tmp_path.rglob("*.xplane.pb")
    content = profile.read_bytes()
    assert [
        phase.name for phase in (Phase.DATA, Phase.BACKWARD, Phase.EXCHANGE) if phase.name.lower().encode() in content
    ] == ["DATA", "BACKWARD", "EXCHANGE"]
