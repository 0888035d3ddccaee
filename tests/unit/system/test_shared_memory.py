"""Arrays in memory that two processes share by its descriptor; here two objects stand for them."""

import json
import os

import numpy as np
import pytest

from hpctrain.system.shared_memory import ALIGNMENT, AnonymousMemory


@pytest.mark.parametrize("named_by_kernel", [True, False])
def test_what_one_puts_the_other_sees(named_by_kernel, monkeypatch):
    if not named_by_kernel:
        monkeypatch.delattr(os, "memfd_create")
    ours = AnonymousMemory.create()
    theirs = AnonymousMemory(os.dup(ours.descriptor))
    first = {"x": np.arange(5.0), "empty": np.zeros((0, 3)), "flag": np.array([True, False]), "one": np.array(7)}
    larger = {"x": np.arange(30_000, dtype=np.int32).reshape(3, 100, 100).transpose(2, 0, 1), "y": np.arange(3)}
    for arrays in (first, larger, first):
        places = json.loads(json.dumps(theirs.put(arrays)))
        assert all(offset % ALIGNMENT == 0 for *_, offset in places)
        views = ours.views(places)
        assert views.keys() == arrays.keys()
        for name, array in arrays.items():
            assert views[name].dtype == array.dtype and np.array_equal(views[name], array)
    ours.close()
    theirs.close()


def test_nothing_takes_no_room():
    memory = AnonymousMemory.create()
    assert memory.views(memory.put({})) == {}
    memory.close()
