"""Fine-tuning of a Llama, in full or by LoRA, on token files made by ``hpctrain data pack --kind text``.

The model is built without values; each rank reads its rows from ``checkpoint.init_from``. Needs transformers, and peft
for LoRA.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hpctrain import TorchTask, packed_notes


def pretrained(base: str, dtype: torch.dtype) -> nn.Module:
    """The model of a Hugging Face folder, on the meta device."""
    config = LlamaConfig.from_pretrained(base)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # its buffers are in no file, so they need values
    return model


def with_adapter(model: nn.Module, adapter: str) -> nn.Module:
    """The model, frozen, with a new adapter in fp32 as described by a folder's ``adapter_config.json``."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    model = get_peft_model(model, LoraConfig.from_pretrained(adapter))
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.lora_A.to_empty(device="cpu")
            layer.lora_B.to_empty(device="cpu")
            layer.reset_lora_parameters("default", init_lora_weights=True)
    return model


def starts(tokens: Tensor, end_of_text: int) -> Tensor:
    """bool[n, t]: whether a token is the first of its document, or of the sample."""
    first = torch.ones_like(tokens[:, :1], dtype=torch.bool)
    return torch.cat([first, tokens[:, :-1] == end_of_text], dim=1)


def positions(tokens: Tensor, end_of_text: int) -> Tensor:
    """int64[n, t]: the place of each token in its document, from which the model sees which tokens belong together."""
    places = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    return places - places.where(starts(tokens, end_of_text), 0).cummax(dim=1).values


def task(
    base: str, train: str, validation: str | None = None, adapter: str | None = None, lr: float = 1e-5
) -> TorchTask:
    """Build the task.

    Args:
        base: folder with the model's ``config.json``.
        train: token file.
        validation: another one.
        adapter: folder with an ``adapter_config.json`` for LoRA; without it, all weights are trained.
        lr: learning rate.
    """
    model = pretrained(base, torch.bfloat16 if adapter else torch.float32)
    if adapter:
        model = with_adapter(model, adapter)
    end_of_text = int(packed_notes(train)["end_of_text"])

    def forward(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        tokens = batch["tokens"][:, :-1].long()
        return model(input_ids=tokens, position_ids=positions(tokens, end_of_text), use_cache=False).logits

    def loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Sum of the cross-entropy of the next tokens, and their number; none has to be guessed after a text's end."""
        tokens = batch["tokens"].long()
        counts = tokens[:, :-1] != end_of_text
        each = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return (each * counts.flatten()).sum(), counts.sum()

    return TorchTask(
        model=model,
        loss=loss,
        optimizer=torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr, betas=(0.9, 0.95)),
        train=train,
        validation=validation,
        forward=forward,
    )
