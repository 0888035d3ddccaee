"""A script for the Hugging Face Trainer that saves at a time limit: hpctrain submit --launch.nodes 2 -- python train.py

It trains a small causal language model from scratch on generated text.
"""

import argparse
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from hpctrain.callbacks.transformers import SaveOnStop, newest_checkpoint

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=200)
options.add_argument("--seconds-per-step", type=float, default=0.0)
args = options.parse_args()


class Pause(TrainerCallback):
    """Makes steps of this small model as long as those of a large one."""

    def on_step_begin(self, *_: object, **__: object) -> None:
        time.sleep(args.seconds_per_step)


tokens = torch.randint(0, 64, (512, 16), generator=torch.Generator().manual_seed(0)).cumsum(1) % 64
rows = [{"input_ids": row, "labels": row} for row in tokens]
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
settings = TrainingArguments(
    "checkpoints",
    max_steps=args.steps,
    per_device_train_batch_size=8,
    logging_steps=10,
    save_steps=1000,
    save_total_limit=2,
    report_to="none",
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(model, settings, train_dataset=rows, callbacks=[SaveOnStop(), Pause()])
trainer.train(resume_from_checkpoint=newest_checkpoint("checkpoints"))
if trainer.is_world_process_zero():
    print(f"done at step {trainer.state.global_step} weights {sum(each.sum().item() for each in model.parameters())!r}")
