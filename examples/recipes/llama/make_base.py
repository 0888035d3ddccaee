"""Writes a tiny Llama with random weights as a Hugging Face folder, and texts: make_base.py [SEED]"""

import json
import random
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

seed = int(sys.argv[1]) if sys.argv[1:] else 0
torch.manual_seed(seed)
words = random.Random(seed)
size = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
tokens = {"vocab_size": 257, "bos_token_id": None, "eos_token_id": 256, "tie_word_embeddings": True}
model = LlamaForCausalLM(LlamaConfig(**size, **heads, **tokens, max_position_embeddings=256))
model.to(torch.bfloat16).save_pretrained("base")


def counted(step: int) -> str:
    """A text of numbers."""
    first, count = words.randrange(100), words.randrange(4, 12)
    return f"{count} numbers: {' '.join(str(first + step * index) for index in range(count))}."


for name, texts in (("train", 400), ("validation", 40)):
    folder = Path("texts", name)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(texts):
        (folder / f"{number:03}.txt").write_text(counted(1))
for name, step in (("up", 1), ("down", -1)):
    lines = [json.dumps({"text": counted(step)}) for _ in range(300)]
    Path(f"{name}.jsonl").write_text("\n".join(lines) + "\n")
