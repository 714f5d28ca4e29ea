"""A Trainer run: packed rows, checkpoints, generation.

`Trainer` of transformers works as it is: name the kernels, and give it a collator that joins the
texts of a batch into one row without padding. Documents are separate in attention. A checkpoint
stores nothing of the kernels: any `attn_implementation` loads it.

The task is a toy: count in steps of 1 to 3. The model is a small Qwen3.

    $ python examples/trainer.py
    mean loss of 150 steps 0.52
    prompt 3 5 7 9 continued 11 13 15 17 19 21 23 25 27 29 31 33
"""

from __future__ import annotations

import tempfile

import torch
from transformers import (
    DataCollatorWithFlattening,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
)

from transformer_kernels.integrations import huggingface

NUMBERS = 50
CONFIG = Qwen3Config(
    num_hidden_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=NUMBERS,
    eos_token_id=None,
)


def texts(count: int) -> list[dict[str, list[int]]]:
    drawn = torch.stack([torch.randint(low, high, (count,)) for low, high in ((1, 4), (8, 40))])
    starts = torch.randint(NUMBERS, (count,)).tolist()
    return [
        {"input_ids": [(start + step * i) % NUMBERS for i in range(length)]}
        for start, (step, length) in zip(starts, drawn.T.tolist(), strict=True)
    ]


def main() -> None:
    torch.manual_seed(0)
    huggingface.register()
    model = Qwen3ForCausalLM(CONFIG)
    model.set_attn_implementation("transformer_kernels")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=150,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(
            model, arguments, data_collator=DataCollatorWithFlattening(), train_dataset=texts(3000)
        )
        trainer.remove_callback(PrinterCallback)
        print(f"mean loss of {arguments.max_steps} steps {trainer.train().training_loss:.2f}")
        trainer.save_model(folder)
        trained = Qwen3ForCausalLM.from_pretrained(
            folder, attn_implementation="transformer_kernels"
        )

    prompt = torch.tensor([[3, 5, 7, 9]])
    written = trained.generate(prompt, max_new_tokens=12, do_sample=False)[0].tolist()
    print("prompt", *written[:4], "continued", *written[4:])
    assert written == list(range(3, 35, 2))


if __name__ == "__main__":
    main()
