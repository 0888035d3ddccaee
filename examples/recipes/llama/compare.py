"""Compares logits of exported weights with those that hpctrain computed: compare.py PREDICTED MODEL [ADAPTER]"""

import sys

import h5py
import torch
from llama import positions
from transformers import AutoModelForCausalLM

from hpctrain import open_dataset, packed_notes

predicted, folder, *adapters = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if adapters else torch.float32)
for adapter in adapters:
    from peft import PeftModel

    model = PeftModel.from_pretrained(model, adapter)
data = open_dataset("validation.h5")
tokens = torch.from_numpy(data.read(range(len(data)))["tokens"]).long()[:, :-1]
places = positions(tokens, packed_notes("validation.h5")["end_of_text"])
with torch.no_grad():
    logits = model.eval()(input_ids=tokens, position_ids=places, use_cache=False).logits.float()
with h5py.File(predicted) as file:
    theirs = torch.from_numpy(file["output"][:]).float()
difference = float((logits - theirs).abs().max())
print(f"logits of up to {theirs.abs().max():.2f} differ by {difference:.1g}")
sys.exit(difference > 1e-4)  # in fp32, sums may be rounded in another order
