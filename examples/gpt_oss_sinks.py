"""Attention sinks: GPT-OSS without "eager".

Each head of GPT-OSS has a sink, a learned logit that joins the softmax and takes a share of the
weights. Half of its layers have a sliding window. transformers runs it on a CPU with "eager", which
stores all M x N weights. Here a sink is applied to the output by the log-sum-exp of its row; the
gradient of the sinks comes with it. In your own model: `attention(..., sinks=sinks)`.

The model is a small GPT-OSS with random weights. A published one takes the name as an argument:
`from_pretrained(..., attn_implementation="transformer_kernels")`.

    $ python examples/gpt_oss_sinks.py
    eager: training step 520 ms
    transformer_kernels: training step 150 ms
    all gradients agree, among them those of the sinks, such as 1.45e-04
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.benchmark import Timer
from transformers import GptOssConfig, GptOssForCausalLM

from transformer_kernels.integrations import huggingface

CONFIG = GptOssConfig(
    num_hidden_layers=2,
    hidden_size=256,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    sliding_window=128,
    intermediate_size=256,
    num_local_experts=4,
    num_experts_per_tok=2,
    vocab_size=1000,
)


def gradients(model: GptOssForCausalLM, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def main() -> None:
    torch.manual_seed(0)
    huggingface.register()
    model = GptOssForCausalLM(CONFIG)
    tokens = torch.randint(CONFIG.vocab_size, (1, 1024))

    found = {}
    for name in ("eager", "transformer_kernels"):
        model.set_attn_implementation(name)
        found[name] = gradients(model, tokens)
        step = Timer(
            "gradients(model, tokens)",
            globals=globals() | locals(),
            num_threads=torch.get_num_threads(),
        )
        print(f"{name}: training step {step.timeit(3).mean * 1e3:.0f} ms")

    torch.testing.assert_close(found["transformer_kernels"], found["eager"], rtol=1e-3, atol=1e-6)
    sinks = found["transformer_kernels"]["model.layers.0.self_attn.sinks"]
    print(f"all gradients agree, among them those of the sinks, such as {sinks[0].item():.2e}")


if __name__ == "__main__":
    main()
