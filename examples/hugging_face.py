"""Hugging Face: a callback that sees the gradients before the Trainer clips them, for a GPT-2 made on the spot.

python examples/hugging_face.py
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from gradtrack.integrations.transformers import GradtrackCallback


def main(steps: int = 30, report_to: str = "tensorboard") -> GradtrackCallback:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (128, 24))]
    callback = GradtrackCallback(grad_log_every_n_steps=5)
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            "hugging_face_run",
            max_steps=steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            logging_steps=5,
            report_to=report_to,
            save_strategy="no",
            use_cpu=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=data,
        callbacks=[callback],
    )
    trainer.train()
    print(callback.reports[0].notes[0])
    print("norms:", [round(report.clipping.norm_before or 0.0, 3) for report in callback.reports[:5]])
    return callback


if __name__ == "__main__":
    main()
