"""Streams: samples that can only be read one after the other, their number unknown or endless.

Every rank reads all of a stream and decodes its part of each global batch, so all ranks stand at the same position, and
a checkpoint's position is that of any number of ranks.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from hpctrain.data.dataset import ArrayDataset, Field, Samples, check_field, from_arrays, users_code, with_place
from hpctrain.data.order import first_draw, part_of
from hpctrain.data.pipeline import Batch, prefetched
from hpctrain.data.samples import Recipe, Sample, batch_of, named
from hpctrain.errors import UserError, foreign_errors

UNKNOWN_LENGTH = 2**62
"""Stands for the batches of an epoch that is never seen to end before it does."""


@runtime_checkable
class Resumable(Protocol):
    """Samples one after the other, from a position that can be saved, as in torchdata and MosaicML Streaming.

    All methods are called by the thread that reads ahead. The samples must be the same on every rank.
    """

    def __iter__(self) -> Iterator[Any]:
        """Samples from the present position on, each a dict or tuple of arrays; at the end of the data, its begin."""

    def state_dict(self) -> Mapping[str, Any]:
        """The position behind the sample that was given last: values of JSON and NumPy arrays of numbers."""

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Goes to a position; ``iter`` is called next.

        Args:
            saved: what ``state_dict`` returned, as JSON gives it back.
        """


@dataclass(eq=False)
class Stream:
    """Samples of one source, from the beginning or from a position. Use ``open_stream``, which checks it."""

    source: Any
    names: tuple[str, ...] | None
    """Of the parts of samples."""
    first: Sample
    without: Callable[[int], Iterable[Any]]
    """without(n) gives the source's samples from its present position on, without the first n."""
    decode: Callable[[Any], Any] | None = None
    """Makes samples of what the source gives; by default these are samples."""

    def __post_init__(self) -> None:
        kind = type(self.source).__name__
        shapes = {name: (1, *value.shape) for name, value in self.first.items()}
        self.fields: Mapping[str, Field] = {
            name: check_field(name, shapes[name], value.dtype, kind) for name, value in self.first.items()
        }

    def undecoded(self, skip: int = 0) -> Iterator[Any]:
        """From the present position on, without the first ``skip`` ones: what ``sample`` makes samples of."""
        number, kind = skip, type(self.source).__name__

        def failed(error: Exception) -> UserError:
            return UserError(f"{kind} failed after sample {number}: {with_place(error)}", "correct the stream")

        with foreign_errors(failed):
            for each in self.without(skip):
                yield each if self.decode else named(host(each), self.names)
                number += 1

    def sample(self, undecoded: Any, number: int) -> Sample:
        """Raises UserError that tells the sample's number in the epoch."""
        if self.decode is None:
            return cast(Sample, undecoded)
        return decoded(undecoded, self.decode, self.names, number, type(self.source).__name__)

    def state_dict(self) -> dict[str, Any]:
        """The source's position; empty if it has none."""
        return copy.deepcopy(dict(self.source.state_dict())) if isinstance(self.source, Resumable) else {}

    def example(self) -> ArrayDataset:
        """The first sample as a dataset."""
        return from_arrays({name: value[None] for name, value in self.first.items()})

    def fingerprint(self) -> str:
        """Of the class and the first sample."""
        digest = hashlib.sha256(type(self.source).__qualname__.encode())
        for name, value in self.first.items():
            digest.update(f"\n{name} {value.shape} {value.dtype.str}".encode() + value.tobytes())
        return digest.hexdigest()


def is_stream(source: Any) -> bool:
    """Whether this is data that can only be read one sample after the other."""
    if isinstance(source, (Stream, Resumable)):
        return True
    return "torch.IterableDataset" in bases_of(source) or (has_skip(source) and int(source.cardinality()) == -1)


def bases_of(source: Any) -> set[str]:
    """The classes that it derives from, by name and package; imports none."""
    return {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in type(source).__mro__}


def has_skip(source: Any) -> bool:
    """Whether this is a tf.data pipeline; does not import TensorFlow."""
    return any(base.__module__.startswith("tensorflow.") for base in type(source).__mro__) and hasattr(source, "skip")


def open_stream(
    source: Any, fields: tuple[str, ...] | list[str] | None = None, decode: Callable[[Any], Any] | None = None
) -> Stream:
    """Opens data that is read one sample after the other, of unknown or endless number.

    Args:
        source: an object with ``__iter__``, ``state_dict`` and ``load_state_dict`` (its state is saved and resumed); a
            tf.data.Dataset or torch IterableDataset of single samples; or another iterable that begins again whenever
            ``iter`` is called (a resumed run passes over the samples that it has seen).
        fields: arrays to take, in this order; names the parts of samples that are tuples.
        decode: decode(raw) gives a sample, a dict or tuple of arrays, of what the source gives, such as the bytes of a
            picture. Every rank reads all of the source, but decodes only what it trains on, some batches later: the
            source must not change what it has given.

    Raises:
        UserError: the source gives no samples, can be read only once, or its samples cannot be trained on.
    """
    if isinstance(source, Stream):
        if fields is not None or decode is not None:
            raise UserError("open_stream got a stream that is open", "give it the source, and fields and decode once")
        return source
    kind, names = type(source).__name__, None if fields is None else tuple(fields)
    if "torch.DataLoader" in bases_of(source):
        raise UserError(f"{kind} gives batches, not samples", "give its .dataset: hpctrain batches and prefetches")
    if has_skip(source):
        pipeline = importlib.import_module("hpctrain.backends.tensorflow.task.dataset").in_order(source)

        def without(count: int) -> Iterable[Any]:
            elements: Iterable[Any] = pipeline.skip(count).as_numpy_iterator()
            return elements

        return Stream(pipeline, names, first_of(without(0), kind, decode, names), without, decode)
    if not isinstance(source, Iterable):
        raise UserError(f"{kind} is not a stream: it cannot be iterated", "give an object with __iter__")
    if isinstance(source, Resumable):
        begin = copy.deepcopy(dict(source.state_dict()))
        first = first_of(source, kind, decode, names)
        source.load_state_dict(begin)
    elif isinstance(source, Iterator):
        raise UserError(
            f"{kind} can be read only once, so a run could not be resumed",
            "give an object whose __iter__ begins again, or one with state_dict and load_state_dict",
        )
    else:
        first = first_of(source, kind, decode, names)
    return Stream(source, names, first, lambda count: islice(iter(source), count, None), decode)


def first_of(
    source: Iterable[Any], kind: str, decode: Callable[[Any], Any] | None, names: tuple[str, ...] | None
) -> Sample:
    """The first sample; raises UserError if there is none."""
    with users_code(f"{kind} failed at its first sample", "correct the stream"):
        for raw in source:
            return decoded(raw, decode, names, 0, kind)
    raise UserError(f"the stream {kind} gives no samples", "give data with at least one sample")


def decoded(
    raw: Any, decode: Callable[[Any], Any] | None, names: tuple[str, ...] | None, number: int, kind: str
) -> Sample:
    """The arrays of what a source of this kind gave; raises UserError that tells the sample's number."""
    fix = "correct the stream, or the function that decodes its samples"
    with users_code(f"sample {number} of {kind} cannot be decoded", fix):
        return named(host(decode(raw) if decode else raw), names)


def host(sample: Any) -> Any:
    """Tensors as arrays: of torch, or eager ones of TensorFlow."""
    if isinstance(sample, Mapping):
        return {name: host(value) for name, value in sample.items()}
    if isinstance(sample, (tuple, list)):
        return tuple(map(host, sample))
    return sample.detach().cpu().numpy() if hasattr(sample, "detach") else sample


@dataclass(frozen=True)
class StreamOrder:
    """Consecutive samples of a stream as global batches."""

    global_batch: int
    """Samples of one global batch; the last one of an epoch may be smaller."""
    drop_last: bool = False
    """Leave out the last global batch of an epoch if it is smaller."""
    batches_per_epoch: int = UNKNOWN_LENGTH
    """Not known."""

    def fingerprint(self) -> str:
        """A stream has one order only."""
        return ""


@dataclass(eq=False)
class StreamingData:
    """Endless global batches of a stream, of which this rank gets its part; see TrainingData."""

    stream: Stream
    """Read whole by every rank."""
    order: StreamOrder
    """How it is cut."""
    rank: int
    size: int
    accumulate: int = 1
    prefetch: int = 2
    """Batches held ready by a thread; 0 reads when a batch is asked for."""
    recipe: Recipe = field(default_factory=Recipe)
    """From samples to a batch."""
    place: Callable[[Samples], Samples] = lambda samples: samples
    batches: Generator[tuple[Batch, dict[str, Any]], None, None] | None = field(default=None, init=False)
    at: tuple[int, int] = field(default=(0, 0), init=False)
    """Epoch and batch that begin at the position."""

    def __post_init__(self) -> None:
        self.position = self.stream.state_dict()

    def starting_at(self, epoch: int, batch: int) -> Iterator[Batch]:
        """Batches from this one on, without end; an earlier iterator of this object is closed."""
        self.close()
        skip = batch * self.order.global_batch
        if self.position and (epoch, batch) == self.at:
            self.stream.source.load_state_dict(copy.deepcopy(self.position))
            skip = 0
        self.batches = prefetched(self._load(epoch, batch, skip), self.prefetch)
        return self._handed_out(self.batches)

    def state_dict(self) -> dict[str, Any]:
        """The stream's position behind the batch that was taken last; empty if the source has none."""
        if not self.position:
            return {}
        return {"at": list(self.at), **{f"stream.{key}": value for key, value in self.position.items()}}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """What ``state_dict`` gave; ``starting_at`` then begins there."""
        epoch, batch = saved["at"]
        self.at = (epoch, batch)
        named = {key: value for key, value in saved.items() if key.startswith("stream.")}
        self.position = {key.removeprefix("stream."): value for key, value in named.items()}

    def close(self) -> None:
        """Ends the thread; may be called again."""
        if self.batches:
            self.batches.close()
        self.batches = None

    def _handed_out(self, items: Iterator[tuple[Batch, dict[str, Any]]]) -> Iterator[Batch]:
        for batch, self.position in items:
            self.at = (batch.epoch + 1, 0) if batch.ends_epoch else (batch.epoch, batch.index + 1)
            yield batch

    def _load(self, epoch: int, batch: int, skip: int) -> Generator[tuple[Batch, dict[str, Any]], None, None]:
        may_be_at_end = bool(self.position) and epoch > 0  # a saved position: then nothing comes before the next begin
        while True:
            before = batch
            for samples, position, is_last in self._chunks(skip):
                yield self._batch(epoch, batch, samples, is_last), position
                batch += 1
            if batch == before and not may_be_at_end:
                raise UserError(
                    f"the stream {type(self.stream.source).__name__} gives no samples in epoch {epoch}"
                    + (f" behind the first {skip}" if skip else ""),
                    "let its __iter__ begin again at the end of the data"
                    if not self.order.drop_last
                    else f"use a global batch below {self.order.global_batch}, or set data.drop_last to false",
                )
            if batch > before:
                epoch += 1
            batch, skip, may_be_at_end = 0, 0, False

    def _chunks(self, skip: int) -> Iterator[tuple[list[Any], dict[str, Any], bool]]:
        """What makes each global batch to the end of the data, the position behind it, whether it is the last."""
        size = self.order.global_batch
        look_ahead = size if self.order.drop_last else 1
        samples = self.stream.undecoded(skip)
        ahead: deque[Any] = deque()
        while True:
            chunk = [*ahead, *islice(samples, size - len(ahead))]
            if not chunk or (len(chunk) < size and self.order.drop_last):
                return
            position = self.stream.state_dict()
            ahead = deque(islice(samples, look_ahead))
            is_last = len(ahead) < look_ahead
            yield chunk, position, is_last
            if is_last:
                return

    def _batch(self, epoch: int, index: int, samples: list[Any], is_last: bool) -> Batch:
        begin = index * self.order.global_batch
        part = part_of(len(samples), self.rank, self.size)
        drawn = first_draw(np.arange(begin + part.start, begin + part.stop), epoch)
        own = [self.stream.sample(each, i) for each, i in zip(samples[part], drawn.ids.tolist(), strict=True)]
        pieces = [part_of(len(own), piece, self.accumulate) for piece in range(min(self.accumulate, len(own)))]
        return Batch(
            epoch=epoch,
            index=index,
            micro_batches=tuple(self.place(batch_of(own[piece], self.recipe, drawn.part(piece))) for piece in pieces),
            local_samples=len(own),
            global_samples=len(samples),
            sample_ids=drawn.ids,
            ends_epoch=is_last,
        )
