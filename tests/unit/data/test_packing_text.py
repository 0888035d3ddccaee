"""Text becomes samples of tokens: none is lost, memory is bounded, and bad text ends in one sentence."""

from __future__ import annotations

import json
import resource
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hpctrain import UserError, open_dataset, packed_notes
from hpctrain.cli import main
from hpctrain.data.packing import pack_source, text
from hpctrain.data.packing.pack_source import PackSource
from hpctrain.data.packing.text import BYTES, TextForm, Tokenizer, files_of, open_tokenizer, text_source
from hpctrain.data.tokens import token_counter

END = 256
STORY = "Once upon a time\nthere was a \u00fcber-k\u00e4fer \U0001f41e\r\n" * 30


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def pack(*words: object) -> None:
    assert main(["data", "pack", *map(str, words)]) == 0


def samples(path: str) -> NDArray[Any]:
    dataset = open_dataset(path)
    return dataset.read(np.arange(len(dataset)))["tokens"]


def row(windows: NDArray[Any]) -> NDArray[Any]:
    """The tokens that samples were cut of."""
    assert np.array_equal(windows[1:, 0], windows[:-1, -1])
    return np.concatenate([windows[:, :-1].ravel(), windows[-1:, -1]])


def lines(path: str, *texts: str, name: str = "text") -> None:
    Path(path).write_text("\n\n".join(json.dumps({"id": 1, name: each}) for each in texts), encoding="utf-8")


def test_texts_are_joined_and_cut_into_samples():
    Path("a.txt").write_bytes(b"abcde")
    Path("b.md").write_bytes(b"\xef\xbb\xbffg\r\n")  # with a byte order mark
    lines("c.jsonl", "h\u00e9", "", "i")
    pack("a.txt", "b.md", "c.jsonl", "-o", "tokens.h5", "--context", 3)
    wanted = [*b"abcde", END, *b"fg\r\n", END, *"h\u00e9".encode(), END, *b"i", END]
    found = samples("tokens.h5")
    assert found.dtype == np.uint16 and found.shape == (5, 4)
    assert row(found).tolist() == wanted[:16]
    assert packed_notes("tokens.h5") == {
        "tokenizer": "bytes",
        "vocabulary": 257,
        "end_of_text": END,
        "context": 3,
        "documents": 4,
        "tokens": len(wanted),
    }


def test_folders_by_name_without_what_is_hidden():
    for name in ("b/two.txt", "a.md", ".git/hidden.md", "b/.secret.txt", "b/picture.png"):
        Path("texts", name).parent.mkdir(parents=True, exist_ok=True)
        Path("texts", name).write_text(name)
    pack("texts", "--kind", "text", "-o", "tokens.h5", "--context", 1)
    assert row(samples("tokens.h5")).tolist() == [*b"a.md", END, *b"b/two.txt", END]


def test_the_same_text_gives_the_same_file():
    Path("a.txt").write_text(STORY)
    for name in ("one.h5", "two.h5"):
        pack("a.txt", "-o", name, "--context", 16)
    assert Path("one.h5").read_bytes() == Path("two.h5").read_bytes()


def of(files: list[Path], tokenizer: Tokenizer, context: int) -> tuple[PackSource, NDArray[Any]]:
    """The source of files, and its samples."""
    with text_source(files_of(files), TextForm(tokenizer, context), Path()) as made:
        return made, np.concatenate([block["tokens"] for block in made.blocks()])


@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=40), min_size=1, max_size=5),
    context=st.integers(1, 9),
    piece=st.integers(1, 50),
)
def test_nothing_is_lost_wherever_pieces_end(texts, context, piece):
    files = []
    for number, each in enumerate(texts):
        files.append(Path(f"{number}.txt"))
        files[-1].write_bytes(each.encode())
    wanted = [token for each in texts for token in (*each.encode().removeprefix(b"\xef\xbb\xbf"), END)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "PIECE_BYTES", piece)
        patch.setattr(pack_source, "BLOCK_BYTES", 4 * (context + 1))
        if len(wanted) <= context:
            with pytest.raises(UserError, match=f"the text has {len(wanted)} tokens, and a sample"):
                of(files, BYTES, context)
            return
        made, windows = of(files, BYTES, context)
    assert made.length == len(windows) == (len(wanted) - 1) // context
    assert row(windows).tolist() == wanted[: made.length * context + 1]


@dataclass
class Words:
    """One token a line, of which there are many."""

    name: str = "words"
    sha256: str = "0"
    vocabulary: int = 70_000
    end: int = 69_999
    seen: list[str] = field(default_factory=list)

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        self.seen += texts
        return [np.array([len(line) for line in each.splitlines()], np.int64) for each in texts]


def test_a_long_text_is_cut_at_the_ends_of_lines(monkeypatch):
    monkeypatch.setattr(text, "PIECE_BYTES", 100)
    Path("a.txt").write_text(STORY, newline="")
    words = Words()
    _, windows = of([Path("a.txt")], words, 7)
    assert len(words.seen) > 10 and all(piece.endswith("\n") for piece in words.seen if piece)
    assert "".join(words.seen) == STORY
    assert windows.dtype == np.int32, "which has room for all"
    assert row(windows).tolist() == [len(line) for line in STORY.splitlines()][: 7 * len(windows) + 1]


def test_memory_does_not_grow_with_the_text(monkeypatch):
    monkeypatch.setattr(text, "PIECE_BYTES", 2**16)
    monkeypatch.setattr(pack_source, "BLOCK_BYTES", 2**16)
    Path("a.txt").write_bytes(b"forty-two\n" * 400_000)
    tracemalloc.start()
    pack("a.txt", "-o", "tokens.h5", "--context", 512, "--json")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert Path("tokens.h5").stat().st_size > 8e6
    assert most < 3e6


def trained() -> None:
    """A tokenizer.json with few words, which asks for texts to be cut and filled up."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([STORY], trainer)
    made.enable_truncation(5)
    made.enable_padding(pad_token="<pad>", length=9)
    made.save("tokenizer.json")


def test_a_tokenizer_of_hugging_face():
    trained()
    Path("a.txt").write_text(STORY, newline="")
    pack("a.txt", "-o", "tokens.h5", "--context", 8, "--tokenizer", "tokenizer.json")
    notes = packed_notes("tokens.h5")
    assert notes["tokenizer"] == "tokenizer.json" and len(notes["tokenizer_sha256"]) == 64
    assert notes["end_of_text"] == 1 and 257 < notes["vocabulary"] <= 300
    found = row(samples("tokens.h5"))
    library = tokenizers.Tokenizer.from_file("tokenizer.json")
    assert STORY.startswith(library.decode(found.tolist()).rstrip("\ufffd"))
    assert notes["tokens"] - len(found) < 8 < len(found) < len(STORY)


def test_a_tokenizer_needs_an_end(refused):
    trained()
    Path("a.txt").write_text(STORY)
    words = ("a.txt", "-o", "tokens.h5", "--tokenizer", "tokenizer.json", "--end-of-text", "<end>")
    assert "tokenizer.json has no token <end> to end a text" in refused(*words)


def test_a_tokenizer_that_is_none(refused):
    Path("a.txt").write_text(STORY)
    Path("tokenizer.json").write_text("{}")
    said = refused("a.txt", "--tokenizer", "tokenizer.json")
    assert "is not a tokenizer" in said
    assert "does not exist" in refused("a.txt", "--tokenizer", "nowhere.json")
    with pytest.raises(UserError, match="an end of text is named for bytes"):
        open_tokenizer(None, "</s>")


def words_of(path: str, vocabulary: dict[str, int]) -> None:
    """A tokenizer.json of whole words."""
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    none = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    split = {"pre_tokenizer": {"type": "Whitespace"}, "added_tokens": []}
    Path(path).write_text(json.dumps({"version": "1.0", **dict.fromkeys(none), **split, "model": model}))


def test_tokenizers_with_odd_tokens(refused):
    Path("a.txt").write_text("once upon a time " * 9)
    words_of("poor.json", {"once": 0, "</s>": 1})
    said = refused("a.txt", "--tokenizer", "poor.json")
    assert "poor.json cannot encode the text: WordLevel error: Missing [UNK] token" in said
    words_of("sparse.json", {"once": 2**31 - 2, "<unk>": 70_000, "</s>": 0})
    pack("a.txt", "-o", "a.h5", "--tokenizer", "sparse.json", "--context", 4)
    assert samples("a.h5")[0].tolist() == [2**31 - 2, 70_000, 70_000, 70_000, 2**31 - 2]
    Path("folder").mkdir()
    assert "folder is a folder" in refused("a.txt", "--tokenizer", "folder")


@pytest.mark.parametrize("room", [1_000, 20_000, 70_000])
def test_a_full_disk(refused, room):
    lines("a.jsonl", *["abc " * 50] * 200)  # 80,000 bytes of tokens, a few at a time
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        said = refused("a.jsonl", "--context", 8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "tokens cannot be written to .: File too large" in said


def test_bad_text(refused):
    Path("latin.txt").write_bytes(b"caf\xe9 au lait")
    assert "latin.txt is not text in UTF-8: invalid continuation byte, 0xe9 near byte 3" in refused("latin.txt")
    Path("bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    assert "bad.jsonl, line 2 is not JSON" in refused("bad.jsonl")
    lines("other.jsonl", "a story", name="story")
    assert "other.jsonl, line 1 is not an object with a text 'text'" in refused("other.jsonl")
    pack("other.jsonl", "-o", "other.h5", "--text-field", "story", "--context", 7)
    Path("nested.jsonl").write_text('{"text": "a"}\n' + "[" * 100_000)
    assert "nested.jsonl, line 2 is not JSON" in refused("nested.jsonl")
    Path("half.jsonl").write_text('{"text": "\\ud83d"}')
    assert "half.jsonl, line 1 has half a character" in refused("half.jsonl")
    Path("short.txt").write_text("too short")
    assert "the text has 10 tokens, and a sample of context 1024 takes 1025" in refused("short.txt")
    Path("empty").mkdir()
    assert "empty holds no text" in refused("empty", "--kind", "text")
    assert "nowhere.txt does not exist" in refused("nowhere.txt")


def test_options_of_another_kind(refused):
    Path("a.txt").write_text(STORY)
    np.save("a.npy", np.arange(3))
    assert "--context is given for npy" in refused("a.npy", "--context", 3)
    assert "--size is given for text" in refused("a.txt", "--size", "3x3")
    assert "--context: give 1 or more in place of -1" in refused("a.txt", "--context", -1)


def test_a_file_that_is_there_is_told_of_first(refused):
    Path("a.txt").write_bytes(b"\xff")
    Path("tokens.h5").write_text("mine")
    assert "tokens.h5 exists" in refused("a.txt", "-o", "tokens.h5")
    assert Path("tokens.h5").read_text() == "mine"


def test_info_tells_what_a_file_says_of_itself(capsys):
    Path("a.txt").write_text(STORY)
    pack("a.txt", "-o", "1.h5", "--context", 16)
    pack("a.txt", "a.txt", "-o", "2.h5", "--context", 16)
    capsys.readouterr()
    assert main(["data", "info", "1.h5", "--seconds", "0"]) == 0
    assert "vocabulary   257\n" in capsys.readouterr().out
    assert main(["data", "info", "?.h5", "--seconds", "0", "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert notes == {"tokenizer": "bytes", "vocabulary": 257, "end_of_text": END, "context": 16}


def test_files_without_notes_and_with_others():
    with h5py.File("plain.h5", "w") as file:
        file["x"] = np.arange(3)
    assert packed_notes("plain.h5") == {}
    for value in ("[]", "{", 3.5, "[" * 60_000):
        with h5py.File("plain.h5", "a") as file:
            file.attrs["hpctrain"] = value
        with pytest.raises(UserError, match="holds no notes of hpctrain data pack"):
            packed_notes("plain.h5")


def test_packed_text_says_how_many_tokens_a_batch_has():
    Path("a.txt").write_text("some text, long enough for several samples")
    for name in ("1.h5", "2.h5"):
        pack("a.txt", "-o", name, "--context", 5)
    for source in ("1.h5", ["1.h5", "2.h5"], lambda: open_dataset("1.h5")):
        dataset = open_dataset(source)
        count = token_counter(None, dataset)
        assert count is not None and count(dataset.read(np.arange(3))) == 15


def test_other_data_have_the_tokens_that_the_task_names():
    dataset = open_dataset({"ids": np.zeros((4, 7), np.int64), "mask": np.eye(4, 7, dtype=bool)})
    batch = dataset.read(np.arange(4))
    counts = [token_counter(name, dataset) for name in (None, "ids", "mask", "texts")]
    assert counts[0] is None and [count and count(batch) for count in counts[1:3]] == [28, 4]
    with pytest.raises(UserError, match=r"tokens of the task is 'texts'.*\n.*name one of ids, mask"):
        counts[3](batch)  # type: ignore[misc]
