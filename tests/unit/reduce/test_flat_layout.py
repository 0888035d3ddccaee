"""Index arithmetic of the flat gradient buffer."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.reduce.flat_layout import ALIGNMENT, plan, slices

sizes = st.lists(st.integers(0, 5000), min_size=1, max_size=30)


@given(sizes, st.one_of(st.none(), st.integers(1, 8000)), st.integers(0, 32))
def test_buckets_cover_the_buffer_in_the_order_of_backward(sizes, bucket, extra):
    layout = plan(sizes, bucket, extra)
    assert layout.buckets[0].begin == 0
    assert layout.buckets[-1].end == layout.length == layout.gradients + extra
    assert all(a.end == b.begin for a, b in itertools.pairwise(layout.buckets))
    members = [index for each in layout.buckets for index in each.members]
    assert members == list(reversed(range(len(sizes))))
    for each in layout.buckets:
        for index in each.members:
            assert each.begin <= layout.offsets[index]
            assert layout.offsets[index] + sizes[index] <= each.end


@given(sizes)
def test_gradients_are_aligned_and_do_not_overlap(sizes):
    layout = plan(sizes, None, 0)
    assert len(layout.buckets) == 1
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    spans = sorted((offset, offset + size) for offset, size in zip(layout.offsets, sizes, strict=True))
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_a_bucket_is_closed_once_it_is_large_enough():
    layout = plan([64, 64, 64, 64], 128, 16)
    assert [bucket.members for bucket in layout.buckets] == [(3, 2), (1, 0)]
    assert layout.buckets[-1].end == 4 * 64 + 16


def test_the_first_and_the_last_bucket_can_be_smaller():
    layout = plan([64] * 12, 256, 16, 64)
    assert [len(bucket.members) for bucket in layout.buckets] == [1, 4, 4, 2, 1]


@given(sizes, st.integers(1, 8000), st.integers(1, 8000))
def test_smaller_ends_cover_the_buffer_too(sizes, bucket, end):
    layout = plan(sizes, bucket, 16, min(bucket, end))
    assert [index for each in layout.buckets for index in each.members] == list(reversed(range(len(sizes))))
    assert all(a.end == b.begin for a, b in itertools.pairwise(layout.buckets))


@given(sizes, st.one_of(st.none(), st.integers(1, 8000)), st.integers(1, 3000))
def test_large_gradients_are_messages_and_the_rest_of_a_bucket_is_one(sizes, bucket, apart):
    layout = plan(sizes, bucket, 16, None, apart)
    assert sorted(layout.apart) == [index for index, size in enumerate(sizes) if size >= apart]
    spans = sorted((offset, offset + size) for offset, size in zip(layout.offsets, sizes, strict=True))
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    for each in layout.buckets:
        own = [(layout.offsets[i], layout.offsets[i] + sizes[i]) for i in layout.apart if i in each.members]
        found = layout.messages(each.begin, each.end)
        assert [one for one in found if one in own] == own and len(found) <= len(own) + 1
        for i in each.members:
            where = (layout.offsets[i], layout.offsets[i] + sizes[i])
            assert not sizes[i] or any(a <= where[0] and where[1] <= b for a, b in found)
    assert layout.messages(0, layout.length)[-1][1] == layout.length


@given(st.integers(0, 100_000), st.integers(1, 64))
def test_slices_cover_and_are_aligned(length, parts):
    found = slices(length, parts)
    assert all(a.stop == b.start for a, b in itertools.pairwise(found))
    assert found[0].start == 0
    assert found[-1].stop == length
    assert len(found) == parts
    assert all(part.start % ALIGNMENT == 0 or part.start == length for part in found)
