"""The Llama of ``llama.py`` on a mixture of JSON-lines files, read as one stream by Hugging Face's ``datasets``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import llama
import numpy as np
from datasets import IterableDataset, interleave_datasets, load_dataset

from hpctrain import TorchTask, packed_notes


def pieces(batch: Mapping[str, list[str]], context: int, end_of_text: int) -> dict[str, list[np.ndarray]]:
    """Texts as bytes, joined and cut into samples of ``context + 1`` tokens, each beginning with the last token of the
    one before; a remainder is dropped."""
    joined = np.concatenate([[*text.encode(), end_of_text] for text in batch["text"]])
    begins = range(0, len(joined) - context, context)
    return {"tokens": [joined[begin : begin + context + 1] for begin in begins]}


def mixture(shares: Mapping[str, float], context: int, end_of_text: int, seed: int) -> IterableDataset:
    """Samples of texts that are drawn from each file with its probability, until every text was drawn."""
    files = [load_dataset("json", data_files=name, split="train", streaming=True) for name in shares]
    mixed = interleave_datasets(
        [file.shuffle(seed, buffer_size=1000) for file in files],
        [*shares.values()],
        seed,
        stopping_strategy="all_exhausted",
    )
    return mixed.map(
        pieces, batched=True, remove_columns=["text"], fn_kwargs={"context": context, "end_of_text": end_of_text}
    )


def task(base: str, shares: dict[str, float], validation: str, seed: int = 0, lr: float = 1e-5) -> TorchTask:
    """Build the task.

    Args:
        base: folder with the model's ``config.json``.
        shares: probability of each file of texts.
        validation: token file; samples for training get its context.
        seed: of the shuffling and the mixture.
        lr: learning rate.
    """
    notes = packed_notes(validation)
    stream = mixture(shares, int(notes["context"]), int(notes["end_of_text"]), seed)
    return replace(llama.task(base, validation, validation, lr=lr), train=stream)
