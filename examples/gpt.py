"""A GPT in PyTorch whose layers can all be split across ranks, on a token file made by ``hpctrain data pack``.

Rotary positions (Su et al. 2021), grouped-query attention (Ainslie et al. 2023), RMSNorm, SwiGLU (Shazeer 2020).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpctrain import TorchTask, UserError, columns, cross_entropy, packed_notes, rows, vocabulary

DTYPES = {"float32": torch.float32, "float64": torch.float64}
NORMS: dict[str, Any] = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}
PADDED_TO = 64
"""The vocabulary is padded to a multiple of this, so that ranks can split it; the added tokens never occur."""
BASE = 10_000.0
"""Base of the rotary frequencies."""


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each after a normalisation and with a residual connection.

    Args:
        width: size of the inputs and outputs.
        heads: number of query heads.
        kv_heads: number of key and value heads; each serves ``heads / kv_heads`` query heads.
        hidden: inner width of the feed-forward network.
        gated: whether the feed-forward network is a SwiGLU rather than a plain GELU.
        norm: class of the normalisation layers.
    """

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int, gated: bool, norm: Any) -> None:
        super().__init__()
        self.head_width, self.queries, self.gated = width // heads, heads // kv_heads, gated
        self.norm1, self.norm2 = norm(width), norm(width)
        # ordered by group (its queries, its key, its value), so that a rank can hold a subset of the groups
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, hidden * (2 if gated else 1), bias=False)  # the gate first
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """float[n, t, width] -> the same shape."""
        x = x + self.out(self.attended(self.qkv(self.norm1(x))))
        hidden = self.up(self.norm2(x))
        if self.gated:
            gate, hidden = hidden.chunk(2, -1)
            return x + self.down(functional.silu(gate) * hidden)
        return x + self.down(functional.gelu(hidden))

    def attended(self, qkv: Tensor) -> Tensor:
        """Attention over the groups in ``qkv``: all of them, or one rank's."""
        grouped = qkv.unflatten(-1, (-1, self.queries + 2, self.head_width)).permute(0, 2, 3, 1, 4)
        rotated = rotate(grouped[:, :, :-1])  # [n, groups, queries and key, t, head_width]
        queries, key, value = rotated[:, :, :-1], rotated[:, :, -1:], grouped[:, :, -1:]
        q, k, v = (part.expand_as(queries).flatten(1, 2) for part in (queries, key, value))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def rotate(x: Tensor) -> Tensor:
    """Rotate each pair of values half the last axis apart by an angle proportional to its position in the sequence.

    Args:
        x: float[..., t, even].
    """
    half, kind = x.shape[-1] // 2, torch.promote_types(x.dtype, torch.float32)
    frequencies = torch.exp(torch.arange(half, device=x.device, dtype=kind) * (-math.log(BASE) / half))
    angles = torch.outer(torch.arange(x.shape[-2], device=x.device, dtype=kind), frequencies)
    first, second = x.to(kind).chunk(2, -1)
    turned = (first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos())
    return torch.cat(turned, -1).to(x.dtype)


class Gpt(nn.Module):
    """int64[n, t] tokens -> float[n, t, vocabulary] logits of the next token at each position, for any t."""

    def __init__(self, words: int, width: int, blocks: list[Block], norm: Any, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = norm(width), nn.Linear(width, words, bias=False)
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                ends_branch = name.endswith(
                    (".out", ".down")
                )  # two per block add to the residual (Radford et al. 2019)
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * len(blocks)) if ends_branch else 0.02)
        if tied:
            self.head.weight = self.words.weight

    def layers(self) -> list[nn.Module]:
        """Layers in order of application."""
        return [self.words, *self.blocks, self.norm, self.head]

    def forward(self, tokens: Tensor) -> Tensor:
        """Apply all layers."""
        x = tokens
        for layer in self.layers():
            x = layer(x)
        return x


def forward(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """Logits of every token except the first."""
    return model(batch["tokens"][:, :-1].long())  # files may hold 16-bit tokens; embeddings need int64


def targets(batch: dict[str, Tensor]) -> Tensor:
    """All tokens except the first."""
    return batch["tokens"][:, 1:].long()


def loss(logits: Any, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the next token, in nats; its exponential is the perplexity."""
    return cross_entropy(logits, targets(batch))


def accuracy(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Fraction of tokens that were the most likely prediction."""
    return (logits.argmax(-1) == targets(batch)).double().mean()


def task(
    train: str,
    validation: str | None = None,
    width: int = 128,
    blocks: int = 4,
    heads: int = 4,
    kv_heads: int | None = None,
    hidden: int | None = None,
    feed_forward: Literal["swiglu", "gelu"] = "swiglu",
    norm: Literal["rms", "layer"] = "rms",
    tied: bool = False,
    dtype: Literal["float32", "float64"] = "float32",
    lr: float = 1e-3,
    weight_decay: float = 0.1,
) -> TorchTask:
    """Build the task.

    Args:
        train: token file made by ``hpctrain data pack``; sets the sequence length.
        validation: another one, made with the same tokenizer.
        width: width of the model.
        blocks: number of transformer blocks.
        heads: number of query heads.
        kv_heads: number of key and value heads; by default ``heads``.
        hidden: inner width of the feed-forward network; by default 4 times the model's width, or 8/3 times if gated.
        feed_forward: swiglu or gelu.
        norm: rms or layer.
        tied: share the weight of the first and last layer.
        dtype: dtype of the parameters; float64 for tests.
        lr: learning rate.
        weight_decay: weight decay of matrices; vectors have none.
    """
    kv_heads = kv_heads or heads
    if width % (2 * heads) or heads % kv_heads:
        raise UserError(
            f"a model of width {width} cannot have {heads} heads of even width, in groups for {kv_heads} heads of keys",
            "choose a width that is a multiple of 2 x heads, and heads that are one of kv_heads",
        )
    known = {"norm": (norm, NORMS), "dtype": (dtype, DTYPES), "feed_forward": (feed_forward, ("swiglu", "gelu"))}
    for name, (value, names) in known.items():
        if value not in names:
            raise UserError(f"task_args.{name} is {value!r}", f"write {' or '.join(names)}")
    gated = feed_forward == "swiglu"
    hidden = hidden or (32 * math.ceil(width / 12) if gated else 4 * width)
    layers = [Block(width, heads, kv_heads, hidden, gated, NORMS[norm]) for _ in range(blocks)]
    words = math.ceil(vocabulary_of(train, validation) / PADDED_TO) * PADDED_TO
    model = Gpt(words, width, layers, NORMS[norm], tied).to(DTYPES[dtype])
    groups = [
        {"params": [one for one in model.parameters() if one.ndim > 1], "weight_decay": weight_decay},
        {"params": [one for one in model.parameters() if one.ndim == 1], "weight_decay": 0.0},
    ]
    return TorchTask(
        model=model,
        loss=loss,
        optimizer=torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True),
        train=train,
        validation=validation,
        metrics={"accuracy": accuracy},
        forward=forward,
        tensor={
            "words": vocabulary,
            "blocks.*.qkv": columns(heads=kv_heads),
            "blocks.*.out": rows,
            "blocks.*.up": columns(parts=2 if gated else 1),
            "blocks.*.down": rows,
            "head": columns(classes=True),
        },
        layers=Gpt.layers,
    )


def vocabulary_of(train: str, validation: str | None) -> int:
    """Return the vocabulary size noted in the token file. Raises UserError if tokenizers differ."""
    notes = packed_notes(train)
    if "vocabulary" not in notes:
        raise UserError(
            f"{train} is not a file of tokens", "make one: hpctrain data pack texts/ --kind text -o train.h5"
        )
    other = notes if validation is None else packed_notes(validation)
    if any(notes.get(key) != other.get(key) for key in ("vocabulary", "tokenizer_sha256")):
        raise UserError(f"{train} and {validation} were made with different tokenizers", "pack them with the same one")
    return int(notes["vocabulary"])
