"""Checkpoints of plans that cut tensors along any axis, damaged in many ways: each way of reading them finds it.

``HPCTRAIN_CORRUPTIONS`` sets how many there are (60 by default), ``HPCTRAIN_SEED`` repeats them.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from hpctrain.checkpoint import read_retry
from hpctrain.checkpoint.export import export_safetensors
from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format import shard as shard_module
from hpctrain.checkpoint.format.boxes import Box
from hpctrain.checkpoint.format.layout import MANIFEST_FILE, DamagedCheckpoint, TensorPiece, tiles
from hpctrain.checkpoint.initial import with_weights
from hpctrain.checkpoint.inspect import tensor_differences, tensor_summaries
from hpctrain.checkpoint.reading import Loaded
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.checkpoint.verify import verify_checkpoint
from hpctrain.errors import HpctrainError
from hpctrain.train.saved_arrays import SavedArrays
from tests.support.checkpoint_of_plan import Part, forge_index, forge_manifest, parts_of, write_shards

SEED = int(os.environ.get("HPCTRAIN_SEED", int.from_bytes(os.urandom(4), "little")))
CORRUPTIONS = int(os.environ.get("HPCTRAIN_CORRUPTIONS", "60"))
BLOCK_BYTES = 1024
"""So that large tensors have several checksums here."""
AXES = {"model/down": 1, "model/up": 0, "model/embed": 2, "model/flags": 0, "optimizer/exp_avg/down": 1}
"""Along which axis a plan cuts a tensor."""


def state(value: int) -> dict[str, NDArray[Any]]:
    """Tensors of several types that are cut, shared out, or in one piece, other ones for each value."""
    rng = np.random.default_rng(value)
    return {
        "model/down": rng.random((40, 48), dtype=np.float32),
        "model/up": rng.random((60, 30), dtype=np.float32),
        "model/qkv": rng.random((24, 20), dtype=np.float32),
        "model/embed": rng.integers(0, 2**16, (4, 30, 16), dtype=np.uint16),
        "model/flags": rng.random(301) < 0.5,
        "model/norm": rng.random(17),
        "optimizer/exp_avg/down": rng.random((40, 48)) + 1j * rng.random((40, 48)),
        "optimizer/step": np.array(float(value)),
        "optimizer/none": np.empty((0, 3)),
    }


def own(rank: int, value: int) -> dict[str, NDArray[Any]]:
    """What a rank has of its own."""
    return {"model/mean": np.full(9, rank + value, np.float32), "rng/python": np.full(30, rank + value, np.uint8)}


def shards_of(value: int, ranks: int, tiled: bool) -> list[list[Part]]:
    """What four ranks write that cut tensors in two, with ``ranks`` pairs of them; in tiles, or each part as it is."""
    shards: list[list[Part]] = [[], [], [], []]
    for name, values in state(value).items():
        dtype = "bfloat16" if name == "model/embed" else ""
        if name == "model/qkv":  # queries, keys and values are cut each by itself
            sixths = parts_of(name, values, 0, 6)
            parts = [[*sixths[0::2]], [*sixths[1::2]]]
        else:
            parts = [[part] for part in parts_of(name, values, AXES.get(name, 0), 2, dtype)]
        for index, mine in enumerate(parts):
            for piece, numbers in mine:  # both of a data group hold it, and share its rows
                if not piece.shape or piece.shape[0] < 2:
                    shards[index].append((piece, numbers))
                    continue
                half = piece.shape[0] // 2
                for member, rows in enumerate((slice(0, half), slice(half, None))):
                    taken = numbers[rows]
                    begin = (piece.box.begin[0] + member * half, *piece.box.begin[1:])
                    shards[index + 2 * member].append((TensorPiece(piece.tensor, Box(begin, taken.shape)), taken))
    for rank in range(ranks):
        for name, values in own(rank, value).items():
            shards[2 * rank] += parts_of(name, values, 0, 1, rank=rank)
    return [[tile for part in shard for tile in tiles_of(*part)] for shard in shards] if tiled else shards


def tiles_of(piece: TensorPiece, numbers: NDArray[Any]) -> list[Part]:
    """A piece as it is written if other plans may cut its tensor."""
    axis, parts = AXES.get(piece.tensor.name, 0), 3 if piece.tensor.name == "model/qkv" else 1
    return [(tile, numbers[tile.box.seen_from(piece.box.begin).index]) for tile in tiles(piece, axis, parts)]


@dataclass(frozen=True)
class Attacked:
    """A checkpoint of step 2, of which each reader's answer is known; step 1 is of another time."""

    store: CheckpointStore
    sound: CheckpointStore
    """A copy of it."""
    answers: dict[str, Any]
    originals: dict[Path, bytes]

    @property
    def folder(self) -> Path:
        """The checkpoint that is damaged."""
        return self.store.folder(2)

    @property
    def shards(self) -> list[Path]:
        """Its files but for the manifest."""
        return [path for path in self.originals if path.name != MANIFEST_FILE]

    def restore(self) -> None:
        """Undoes what was done."""
        for path, data in self.originals.items():
            if path.is_symlink() or not path.is_file():
                remove(path)
                path.write_bytes(data)
            elif path.read_bytes() != data:
                path.write_bytes(data)


def remove(path: Path) -> None:
    """Whatever it is."""
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def values_of(arrays: SavedArrays, cut: Callable[[str, tuple[int, ...]], tuple[slice, ...]] | None = None) -> Any:
    """All values, or a part of each, as bytes by name."""
    found = {}
    for name in arrays:
        shape = arrays.shape_of(name)
        box = cut(name, shape) if cut else tuple(slice(0, length) for length in shape)
        begin = tuple(each.start for each in box)
        found[name] = arrays.part(name, begin, tuple(each.stop - each.start for each in box)).tobytes()
    return found


def half(index: int, axis: int | None = None) -> Callable[[str, tuple[int, ...]], tuple[slice, ...]]:
    """What a rank of two needs: of the plan that saved, or of one that cuts everything along an axis."""

    def cut(name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        along = min(AXES.get(name, 0) if axis is None else axis, len(shape) - 1)
        ends = [(length * index // 2, length * (index + 1) // 2) for length in shape]
        return tuple(slice(*ends[each]) if each == along else slice(0, length) for each, length in enumerate(shape))

    return cut


def taken(store: CheckpointStore, cut: Callable[[str, tuple[int, ...]], tuple[slice, ...]] | None) -> Any:
    """What a resume takes."""
    found: list[Any] = []

    def use(loaded: Loaded) -> dict[str, NDArray[Any]]:
        found.append(values_of(loaded.arrays, cut))
        return {}

    store.load_into(use, 2)
    return found[-1]


def export(store: CheckpointStore) -> bytes:
    """A safetensors file."""
    path = store.path / "out.safetensors"
    with store.opened(2) as loaded:
        export_safetensors(loaded, path)
    return path.read_bytes()


def differences(store: CheckpointStore, sound: CheckpointStore) -> Any:
    """Between a checkpoint and its copy."""
    with sound.opened(2) as first, store.opened(2) as second:
        return tensor_differences(first, second)


def summaries(store: CheckpointStore) -> Any:
    """As ``inspect`` shows them."""
    with store.opened(2) as loaded:
        return [repr(one) for one in tensor_summaries(loaded)]  # NaN is not equal to itself


def verified(store: CheckpointStore) -> None:
    """Raises DamagedCheckpoint with what ``verify`` reports."""
    verdict = verify_checkpoint(store, 2)
    assert verdict.readable
    if verdict.problems:
        raise DamagedCheckpoint("; ".join(verdict.problems))


READERS: dict[str, Callable[[CheckpointStore, CheckpointStore], Any]] = {
    "load": lambda store, sound: values_of(store.load(2).arrays),
    "resume in one process": lambda store, sound: taken(store, None),
    "verify": lambda store, sound: verified(store),
    "resume of the same plan, rank 0": lambda store, sound: taken(store, half(0)),
    "resume of the same plan, rank 1": lambda store, sound: taken(store, half(1)),
    "resume of a plan of rows": lambda store, sound: taken(store, half(1, 0)),
    "resume of a plan of columns": lambda store, sound: taken(store, half(0, 1)),
    "init_from": lambda store, sound: with_weights(
        str(store.folder(2)), lambda weights, path: values_of(weights.arrays), store.group
    ),
    "export": lambda store, sound: export(store),
    "inspect": lambda store, sound: summaries(store),
    "diff": differences,
}
READ_ALL = ("load", "resume in one process", "verify")


@pytest.fixture(
    scope="module",
    params=[(1, False), (2, False), (2, True)],
    ids=["tensor 2, pipeline or shard 2", "tensor 2, data 2", "tensor 2, data 2, in tiles"],
)
def attacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    folder = tmp_path_factory.mktemp("plan")
    store = CheckpointStore(folder / "checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_module, "SUMMED_BYTES", BLOCK_BYTES)
        patch.setattr(layout, "LEAST_TILE_BYTES", 256)
        for step in (1, 2):
            write_shards(store, step, shards_of(step, *request.param), request.param[0])
        assert verify_checkpoint(store, 2).problems == ()
        patch.setattr(h5py, "File", None)
        patch.setattr(read_retry, "PAUSES_S", ())  # nothing that is damaged may be taken for what cannot be read now
        sound = CheckpointStore(shutil.copytree(store.path, folder / "sound"))
        answers = {name: read(sound, sound) for name, read in READERS.items()}
        everything = answers["load"]
        for name, array in state(2).items():
            assert everything[name] == array.tobytes(), "the readers agree with what was saved"
        originals = {path: path.read_bytes() for path in sorted(store.folder(2).iterdir())}
        yield Attacked(store, sound, answers, originals)


Corruption = Callable[[Attacked, random.Random], None]


def rewrite(path: Path, change: Callable[[bytearray], Any]) -> None:
    """Changes the bytes of a file."""
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def any_file(it: Attacked, rng: random.Random) -> Path:
    """Of the checkpoint."""
    return rng.choice(list(it.originals))


def flip_bit(it: Attacked, rng: random.Random) -> None:
    def change(data: bytearray) -> None:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)

    rewrite(any_file(it, rng), change)


def change_bytes(it: Attacked, rng: random.Random) -> None:
    def change(data: bytearray) -> None:
        at = rng.randrange(len(data))
        for place in range(at, min(len(data), at + rng.choice((1, 2, 8, 600)))):
            data[place] ^= rng.randrange(256)

    rewrite(any_file(it, rng), change)


def lose_sector(it: Attacked, rng: random.Random) -> None:
    """Zeros, as of a hole that was never written."""

    def change(data: bytearray) -> None:
        at = rng.randrange(0, len(data), 512)
        data[at : at + 512] = bytes(len(data[at : at + 512]))

    rewrite(any_file(it, rng), change)


def cut_short(it: Attacked, rng: random.Random) -> None:
    rewrite(any_file(it, rng), lambda data: data.__delitem__(slice(rng.randrange(len(data)), None)))


def append(it: Attacked, rng: random.Random) -> None:
    rewrite(any_file(it, rng), lambda data: data.extend(rng.randbytes(rng.choice((1, 16, 5000)))))


def insert(it: Attacked, rng: random.Random) -> None:
    """All that is behind it lies elsewhere."""

    def change(data: bytearray) -> None:
        at = rng.randrange(len(data))
        data[at:at] = rng.randbytes(rng.choice((1, 8, 512)))

    rewrite(any_file(it, rng), change)


def blocks(it: Attacked, path: Path) -> list[tuple[int, int]]:
    """(begin, length) of all full blocks with a checksum in a shard."""
    (shard,) = (shard for shard in it.sound.manifest(2).shards if shard.file == path.name)
    return [
        (stored.offset + at, BLOCK_BYTES)
        for stored in shard.pieces
        for at in range(0, stored.piece.num_bytes - BLOCK_BYTES + 1, BLOCK_BYTES)
    ]


def swap_blocks(it: Attacked, rng: random.Random) -> None:
    """Within a shard or of two: both have their own right checksums elsewhere."""
    one, other = rng.choice(it.shards), rng.choice(it.shards)
    (first, count), (second, _) = rng.choice(blocks(it, one)), rng.choice(blocks(it, other))
    before = {path: path.read_bytes() for path in (one, other)}
    rewrite(one, lambda data: data.__setitem__(slice(first, first + count), before[other][second:][:count]))
    rewrite(other, lambda data: data.__setitem__(slice(second, second + count), before[one][first:][:count]))


def older_block(it: Attacked, rng: random.Random) -> None:
    """What lay there before: a write that never came to the disk."""
    path = rng.choice(it.shards)
    begin, count = rng.choice(blocks(it, path))
    older = (it.store.folder(1) / path.name).read_bytes()[begin : begin + count]
    rewrite(path, lambda data: data.__setitem__(slice(begin, begin + count), older))


def older_end(it: Attacked, rng: random.Random) -> None:
    """From some byte on."""
    path = any_file(it, rng)
    older = (it.store.folder(1) / path.name).read_bytes()

    def change(data: bytearray) -> None:
        at = rng.randrange(min(len(data), len(older)))
        data[at:] = older[at:]

    rewrite(path, change)


def older_file(it: Attacked, rng: random.Random) -> None:
    path = any_file(it, rng)
    shutil.copyfile(it.store.folder(1) / path.name, path)


def swap_files(it: Attacked, rng: random.Random) -> None:
    one, other = rng.sample(it.shards, 2)
    one.write_bytes(it.originals[other])
    other.write_bytes(it.originals[one])


def another_thing(it: Attacked, rng: random.Random) -> None:
    """Nothing, a folder, a link to nothing, or one to a file with the right bytes."""
    path = any_file(it, rng)
    path.unlink()
    kind = rng.randrange(4)
    if kind == 1:
        path.mkdir()
    elif kind > 1:
        path.symlink_to(it.store.path / "nothing" if kind == 2 else it.sound.folder(2) / path.name)


def wrong_entry(rng: random.Random) -> Callable[[Any], None]:
    """A change of an index, which may be none."""
    key = rng.choice(("begin", "count", "shape", "dtype", "offset", "rank", "crc32", "name", "swapped", "gone", "size"))
    size = rng.choice(("bytes", "hdf5_bytes", "block_bytes"))
    axis, by, place, other = rng.randrange(3), rng.choice((-1, 1, 7, 2**40)), rng.random(), rng.random()

    def change(index: Any) -> None:
        tensors = index["tensors"]
        entry = tensors[int(place * len(tensors))]
        partner = tensors[int(other * len(tensors))]
        if key in ("begin", "count", "shape") and entry[key]:
            entry[key][axis % len(entry[key])] += by
        elif key in ("dtype", "crc32"):
            entry[key] = partner[key] if partner[key] != entry[key] else "float16"
        elif key in ("offset", "name", "rank"):
            entry[key] = {"offset": entry["offset"] + 64 * by, "name": f"{entry['name']}x", "rank": 0}[key]
        elif key == "swapped":
            for each in ("begin", "count", "offset"):
                entry[each], partner[each] = partner[each], entry[each]
        elif key == "gone":
            tensors.remove(entry)
        else:
            index[size] += by

    return change


def wrong_manifest(it: Attacked, rng: random.Random) -> None:
    """With a right checksum."""
    number = rng.randrange(len(it.shards))

    def change(manifest: Any) -> None:
        if rng.randrange(8):
            wrong_entry(rng)(manifest["shards"][number])
        else:
            rng.choice([manifest["shards"].reverse, manifest["shards"].pop, manifest["shards"].clear])()

    forge_manifest(it.folder, change)


def wrong_index(it: Attacked, rng: random.Random) -> None:
    """With a right checksum, and of the right length if that can be."""
    forge_index(rng.choice(it.shards), wrong_entry(rng))


def wrong_alike(it: Attacked, rng: random.Random) -> None:
    """Manifest and index, as only a person changes them, with right checksums."""
    number, change = rng.randrange(len(it.shards)), wrong_entry(rng)
    forge_manifest(it.folder, lambda manifest: change(manifest["shards"][number]))
    forge_index(it.shards[number], change)


KINDS: list[Corruption] = [
    flip_bit,
    change_bytes,
    lose_sector,
    cut_short,
    append,
    insert,
    swap_blocks,
    older_block,
    older_end,
    older_file,
    swap_files,
    another_thing,
    wrong_manifest,
    wrong_index,
]


def is_changed(it: Attacked) -> bool:
    """Whether some file is not as it was."""
    return any(
        path.is_symlink() or not path.is_file() or path.read_bytes() != data for path, data in it.originals.items()
    )


def only_random_states(it: Attacked) -> bool:
    """Whether nothing is changed but random states of ranks, which mean nothing to another number of them."""
    shards = {shard.file: shard.pieces for shard in it.sound.manifest(2).shards}
    for path, before in it.originals.items():
        if path.is_symlink() or not path.is_file():
            return False
        now = bytearray(path.read_bytes())
        for stored in shards.get(path.name, ()):
            if stored.piece.tensor.name.startswith("rng/"):
                place = slice(stored.offset, stored.offset + stored.piece.num_bytes)
                now[place] = before[place]
        if now != before:
            return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(60 + CORRUPTIONS)
def test_every_reader_finds_every_corruption(attacked):
    """Who reads all finds it; who reads a part finds it or gives the right values. Nobody fails in another way."""
    rng, found = random.Random(SEED), Counter[str]()
    for number in range(CORRUPTIONS // 2):
        corrupt = KINDS[number % len(KINDS)]
        while not is_changed(attacked):
            corrupt(attacked, rng)
        place = f"seed {SEED}, number {number}, {corrupt.__name__}"
        for name, read in READERS.items():
            try:
                assert read(attacked.store, attacked.sound) == attacked.answers[name], f"{place}: {name} is wrong"
                is_unread = name == "resume in one process" and only_random_states(attacked)
                assert is_unread or name not in READ_ALL, f"{place}: {name} has missed it"
                found[name] += is_unread
            except DamagedCheckpoint:
                found[name] += 1
            except HpctrainError as error:
                raise AssertionError(f"{place}: {name}") from error
        attacked.restore()
    assert {found[name] for name in READ_ALL} == {CORRUPTIONS // 2}
    assert all(found[name] > CORRUPTIONS // 4 for name in READERS), found
    assert {name: read(attacked.store, attacked.sound) for name, read in READERS.items()} == attacked.answers


def test_what_was_forged_with_all_its_checksums_crashes_nobody(attacked):
    """Checksums are no signatures: a reader may believe it, or refuse it in a sentence."""
    rng, refused = random.Random(SEED), 0
    for number in range(CORRUPTIONS // 6):
        while not is_changed(attacked):
            wrong_alike(attacked, rng)
        for name, read in READERS.items():
            try:
                read(attacked.store, attacked.sound)
            except HpctrainError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"seed {SEED}, number {number}: {name}") from error
        attacked.restore()
    assert refused, f"seed {SEED}"
