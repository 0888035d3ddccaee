"""A LoRA adapter (PEFT) for a Hugging Face BERT that classifies rows of numbers; needs transformers and peft."""

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

torch.manual_seed(1)
size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
model = BertForSequenceClassification(BertConfig(vocab_size=100, num_labels=3, **size, **dropout))
model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules=["query", "value"]))
optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)
ids = np.random.default_rng(0).integers(0, 100, (600, 12))
labels = ids.sum(1) % 3
for step in range(30):
    rows = slice(20 * step, 20 * step + 20)
    logits = model(input_ids=torch.from_numpy(ids[rows])).logits
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels[rows]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.8f}")
