"""Streams: iterable data without random access, of unknown or infinite length.

Every rank reads the whole stream and decodes only its part of each global batch. All ranks are therefore at the same
position, and a checkpoint can be resumed on any number of ranks.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from typing import Any, Protocol, TypeGuard, cast, runtime_checkable

import numpy as np

from hpctrain.data.dataset import ArrayDataset, Field, Samples, fields_like, from_arrays, users_code, with_place
from hpctrain.data.global_generators import GlobalGenerators, states
from hpctrain.data.order import first_draw, part_of
from hpctrain.data.pipeline import Batch, prefetched
from hpctrain.data.samples import Recipe, Sample, batch_of, host, named
from hpctrain.errors import HpctrainError, UserError, foreign_errors, refusal

OTHERS = (
    "some may be trained on twice or not at all in this epoch; let it yield the same samples in each process, by "
    "set_epoch(epoch), or give it state_dict and load_state_dict"
)
UNKNOWN_LENGTH = 2**62
"""Stands for the number of batches in an epoch, which is unknown until the epoch ends."""


@runtime_checkable
class Resumable(Protocol):
    """An iterable of samples whose position can be saved, as in torchdata and MosaicML Streaming.

    The samples must be the same on every rank. While training, the prefetch thread calls all methods.
    """

    def __iter__(self) -> Iterator[Any]:
        """Samples from the current position, each a dict or tuple of arrays; at the end of the data, from its start."""

    def state_dict(self) -> Mapping[str, Any]:
        """The position after the last sample yielded: JSON values and NumPy arrays of numbers."""

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore a position; ``iter`` is called next.

        Args:
            saved: what ``state_dict`` returned, after a round trip through JSON.
        """


@dataclass(eq=False)
class Stream:
    """Samples of one source, from its start or a saved position. Create it with ``open_stream``, which checks it."""

    source: Any
    names: tuple[str, ...] | None
    """Names of the arrays in a sample, if given; see ``samples.named``."""
    first: Sample
    without: Callable[[int], Iterable[Any]]
    """without(n) iterates over the source from its current position, skipping the first n samples."""
    decode: Callable[[Any], Any] | None = None
    """Turns a raw item of the source into a sample; None if the items are samples already."""
    draws: bool = False
    """Whether it drew from global random generators up to its first sample."""

    def __post_init__(self) -> None:
        self.fields: Mapping[str, Field] = fields_like(self.first, 1, False, type(self.source).__name__)

    def undecoded(self, skip: int = 0, known: str = "", note: Callable[[str], object] = str) -> Iterator[Any]:
        """Raw items from the current position, skipping the first ``skip``; ``sample`` decodes them.

        Calls ``note`` with a sentence if the last one skipped has not the hash ``known``, unless that is empty.
        """
        number, kind = skip, type(self.source).__name__

        def failed(error: Exception) -> HpctrainError:
            return refusal(error, f"{kind} failed after sample {number}: {with_place(error)}", "correct the stream")

        with foreign_errors(failed):
            for each in self.without(skip - 1 if known else skip):
                item = each if self.decode else named(host(each), self.names)
                if known:
                    if digest_of(item) != known:
                        note(f"{kind} gives another sample {skip - 1} than before the run ended: {OTHERS}")
                    known = ""
                    continue
                yield item
                number += 1

    def sample(self, undecoded: Any, number: int) -> Sample:
        """Decode a raw item; if that fails, raises UserError that names the sample's number in the epoch."""
        if self.decode is None:
            return cast(Sample, undecoded)
        return decoded(undecoded, self.decode, self.names, number, type(self.source).__name__)

    def state_dict(self) -> dict[str, Any]:
        """The source's position; empty if it cannot save one."""
        return copy.deepcopy(dict(self.source.state_dict())) if resumes(self.source) else {}

    def example(self, most: int = 1) -> ArrayDataset:
        """The first samples as a dataset, at most ``most`` and of one shape; more than one are read."""
        samples = [self.first]
        if most > 1:
            begin, generators = self.state_dict(), GlobalGenerators(0)
            generators.reseed(0, 0)
            with generators.used():
                raw = enumerate(islice(self.undecoded(), most))
                samples = [copy.deepcopy(self.sample(each, number)) for number, each in raw]
            if resumes(self.source):
                self.source.load_state_dict(begin)

        def fits(sample: Sample) -> bool:
            return {name: Field(value.shape, value.dtype) for name, value in sample.items()} == self.fields

        samples = list(takewhile(fits, samples)) or [self.first]
        return from_arrays({name: np.stack([sample[name] for sample in samples]) for name in self.fields})

    def fingerprint(self) -> str:
        """sha256 of the source's class name and first sample."""
        digest = hashlib.sha256(type(self.source).__qualname__.encode())
        for name, value in self.first.items():
            digest.update(f"\n{name} {value.shape} {value.dtype.str}".encode() + value.tobytes())
        return digest.hexdigest()


def is_stream(source: Any) -> bool:
    """Whether this data can only be read sequentially."""
    if isinstance(source, (Stream, Resumable)):
        return True
    return "torch.IterableDataset" in bases_of(source) or (has_skip(source) and int(source.cardinality()) == -1)


def resumes(source: Any) -> TypeGuard[Resumable]:
    """Whether positions of the source can be saved.

    Those of Hugging Face are of the last iterator, not the next one, and lack what a shuffle buffer holds.
    """
    return isinstance(source, Resumable) and "datasets.IterableDataset" not in bases_of(source)


def bases_of(source: Any) -> set[str]:
    """The source's class and base classes as ``package.Name``; imports nothing."""
    return {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in type(source).__mro__}


def has_skip(source: Any) -> bool:
    """Whether this is a tf.data pipeline; does not import TensorFlow."""
    return any(base.__module__.startswith("tensorflow.") for base in type(source).__mro__) and hasattr(source, "skip")


def open_stream(
    source: Any, fields: tuple[str, ...] | list[str] | None = None, decode: Callable[[Any], Any] | None = None
) -> Stream:
    """Open data that is read sequentially and has unknown or infinite length.

    Args:
        source: an object with ``__iter__``, ``state_dict`` and ``load_state_dict`` (its state is saved and resumed); a
            tf.data.Dataset or torch IterableDataset of single samples; or another iterable that starts over whenever
            ``iter`` is called (a resumed run skips the samples that it has seen).
        fields: arrays to use, in this order; names the parts if samples are tuples.
        decode: decode(raw) turns a raw item, such as the bytes of an image, into a sample: a dict or tuple of arrays.
            Every rank reads the whole source but decodes only what it trains on, some batches later, so the source
            must not modify items that it has yielded.

    Raises:
        UserError: the source yields no samples, can be read only once, or its samples cannot be trained on.
    """
    if isinstance(source, Stream):
        if fields is not None or decode is not None:
            raise UserError("open_stream got a stream that is open", "give it the source, and fields and decode once")
        return source
    generators = GlobalGenerators(0)
    generators.reseed(0, 0)
    with generators.used():
        before = digest_of(states())
        stream = opened(source, fields, decode)
        return replace(stream, draws=digest_of(states()) != before)


def opened(source: Any, fields: tuple[str, ...] | list[str] | None, decode: Callable[[Any], Any] | None) -> Stream:
    """See ``open_stream``."""
    kind = type(source).__name__
    names = None if fields is None else tuple(fields)
    if "torch.DataLoader" in bases_of(source):
        raise UserError(f"{kind} gives batches, not samples", "give its .dataset: hpctrain batches and prefetches")
    if has_skip(source):
        from hpctrain.data.formats import tf_dataset

        pipeline = tf_dataset.in_order(source)
        names = names or tf_dataset.names_of(pipeline.element_spec)

        def without(count: int) -> Iterable[Any]:
            elements: Iterable[Any] = pipeline.skip(count).as_numpy_iterator()
            return elements

        return Stream(pipeline, names, first_of(without(0), kind, decode, names), without, decode)
    if not isinstance(source, Iterable):
        raise UserError(f"{kind} is not a stream: it cannot be iterated", "give an object with __iter__")
    if resumes(source):
        begin = copy.deepcopy(dict(source.state_dict()))
        first = first_of(source, kind, decode, names)
        source.load_state_dict(begin)
    elif isinstance(source, Iterator):
        fix = "give an object whose __iter__ begins again, or one with state_dict and load_state_dict"
        raise UserError(f"{kind} can be read only once, so a run could not be resumed", fix)
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
    """The arrays of a raw item; if decoding fails, raises UserError that names the sample's number."""
    fix = "correct the stream, or the function that decodes its samples"
    with users_code(f"sample {number} of {kind} cannot be decoded", fix):
        return named(host(decode(raw) if decode else raw), names)


def digest_of(value: Any) -> str:
    """A hash of raw items: of names, text and numbers in them."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Mapping):
            value = [*value.items()]
        if isinstance(value, (list, tuple)):
            digest.update(b"[%d" % len(value))
            for each in value:
                add(each)
        elif isinstance(value, (str, bytes)):
            digest.update(value if isinstance(value, bytes) else value.encode())
        elif (array := np.asarray(host(value))).dtype != object:
            digest.update(f"{array.shape} {array.dtype}".encode() + array.tobytes())

    add(value)
    return digest.hexdigest()


@dataclass(frozen=True)
class StreamOrder:
    """Cuts a stream into global batches of consecutive samples."""

    global_batch: int
    """Samples in a global batch; the last one of an epoch may be smaller."""
    drop_last: bool = False
    """Drop the last global batch of an epoch if it is smaller."""
    batches_per_epoch: int = UNKNOWN_LENGTH
    """Always ``UNKNOWN_LENGTH``."""

    def fingerprint(self) -> str:
        """Empty: a stream has only one order."""
        return ""


Taken = tuple[Batch, dict[str, Any], str, Any]
"""A batch, the stream's position after it, a hash of it or "", and its last raw item."""


@dataclass(eq=False)
class StreamingData:
    """This rank's part of an infinite sequence of global batches of a stream; see TrainingData."""

    stream: Stream
    """Every rank reads all of it."""
    order: StreamOrder
    """How the stream is cut into global batches."""
    rank: int
    size: int
    accumulate: int = 1
    prefetch: int = 2
    """Batches that a thread keeps ready; 0 reads each batch on request."""
    recipe: Recipe = field(default_factory=Recipe)
    """How samples become a batch."""
    place: Callable[[Samples], Samples] = lambda samples: samples
    batches: Generator[Taken, None, None] | None = field(default=None, init=False)
    at: tuple[int, int] = field(default=(0, 0), init=False)
    """Epoch and index of the batch that starts at ``position``."""
    digest: str = field(default="", init=False)
    """Hash of the last batch taken, of all ranks' samples; empty for most batches."""
    last: Any = field(default=None, init=False)
    """The last raw item of that batch."""
    known: str = field(default="", init=False)
    """Its hash before the resume."""
    changed: str = field(default="", init=False)
    """A sentence if the stream has changed since the checkpoint was saved."""

    def __post_init__(self) -> None:
        self.position = self.stream.state_dict()
        self.generators = GlobalGenerators(self.recipe.seed)

    def starting_at(self, epoch: int, batch: int) -> Iterator[Batch]:
        """Infinite iterator over batches, starting with this one; closes any earlier iterator of this object."""
        self.close()
        skip = batch * self.order.global_batch
        known = self.known if skip and (epoch, batch) == self.at else ""
        if self.position and (epoch, batch) == self.at:
            self.stream.source.load_state_dict(copy.deepcopy(self.position))
            skip = 0
        depth = 0 if self.stream.draws or self.recipe.draws else self.prefetch  # the model uses the same generators
        self.batches = prefetched(self._load(epoch, batch, skip, known), depth)
        return self._handed_out(self.batches)

    def state_dict(self) -> dict[str, Any]:
        """The stream's position after the last batch taken; the last item's hash if the source cannot save one."""
        if not self.position:
            known = self.known if self.last is None else digest_of(self.last)
            return {"at": list(self.at), "known": known} if known else {}
        return {"at": list(self.at), **{f"stream.{key}": value for key, value in self.position.items()}}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the result of ``state_dict``, from which ``starting_at`` then continues."""
        epoch, batch = saved["at"]
        self.at, self.known = (epoch, batch), saved.get("known", "")
        named = {key: value for key, value in saved.items() if key.startswith("stream.")}
        self.position = {key.removeprefix("stream."): value for key, value in named.items()}

    def close(self) -> None:
        """Stop the prefetch thread; may be called repeatedly."""
        if self.batches:
            self.batches.close()
        self.batches = None

    def _handed_out(self, items: Iterator[Taken]) -> Iterator[Batch]:
        for batch, self.position, self.digest, self.last in items:
            self.at = (batch.epoch + 1, 0) if batch.ends_epoch else (batch.epoch, batch.index + 1)
            yield batch

    def _load(self, epoch: int, batch: int, skip: int, known: str) -> Generator[Taken, None, None]:
        taken = 0
        may_be_at_end = bool(self.position) and epoch > 0  # a position at the end of the data yields no samples
        while True:
            before = batch
            if hasattr(self.stream.source, "set_epoch"):  # of Hugging Face: shuffles differently
                self.stream.source.set_epoch(epoch)
            for samples, position, is_last in self._chunks(skip, epoch, batch, known):
                taken += 1  # the same on all ranks, wherever they are in their streams
                digest = digest_of((epoch, batch, samples)) if taken.bit_count() == 1 else ""
                yield self._batch(epoch, batch, samples, is_last), position, digest, samples[-1]
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
            batch, skip, may_be_at_end, known = 0, 0, False, ""

    def _chunks(
        self, skip: int, epoch: int, batch: int, known: str
    ) -> Iterator[tuple[list[Any], dict[str, Any], bool]]:
        """For each global batch up to the end of the data: raw items, position after it, whether it is the last."""
        size = self.order.global_batch
        look_ahead = size if self.order.drop_last else 1
        samples = self.stream.undecoded(skip, known, self._note)
        ahead: list[Any] = []
        self.generators.reseed(epoch, batch if self.position else 0)  # a stream without position begins the epoch again
        while True:
            chunk = [*ahead, *self._read(samples, size - len(ahead))]
            if not chunk or (len(chunk) < size and self.order.drop_last):
                return
            position = self.stream.state_dict()
            batch += 1
            if position:
                self.generators.reseed(epoch, batch)  # as a run that resumes at this position
            ahead = self._read(samples, look_ahead)
            is_last = len(ahead) < look_ahead
            yield chunk, position, is_last
            if is_last:
                return

    def _note(self, changed: str) -> None:
        self.changed = changed

    def _read(self, samples: Iterator[Any], count: int) -> list[Any]:
        with self.generators.used() if self.stream.draws else nullcontext():
            return list(islice(samples, count))

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
            global_samples=len(samples),
            sample_ids=drawn.ids,
            ends_epoch=is_last,
        )
