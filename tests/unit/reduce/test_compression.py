"""16-bit forms: the same bits as the hardware's and torch's conversions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

from tests.support.codecs import CODECS

floats = of_numpy.arrays(np.float32, st.integers(0, 50), elements=st.floats(width=32))


@pytest.mark.slow
@settings(deadline=None)  # the first call imports torch
@given(floats)
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_torch_rounds_the_same_way(name, values):
    torch_allreduce = pytest.importorskip("hpctrain.backends.torch.reduce.allreduce")
    packed = {}
    for codec in (CODECS[name], torch_allreduce.CODECS[name]):
        out, back = np.zeros(len(values), np.uint16), np.zeros(len(values), np.float32)
        codec.encode(values, out)
        codec.decode(out, back)
        packed[codec] = back
    first, second = packed.values()
    np.testing.assert_array_equal(first, second)


def test_bfloat16_rounds_to_nearest_even():
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -2.5, np.inf, 0.0], np.float32)
    out, back = np.zeros(6, np.uint16), np.zeros(6, np.float32)
    CODECS["bf16"].encode(values, out)
    CODECS["bf16"].decode(out, back)
    assert back.tolist() == [1.0, 1.0, 1 + 2**-6, -2.5, np.inf, 0.0]
