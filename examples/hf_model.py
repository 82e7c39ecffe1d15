"""Train a model of ``transformers`` from its config, byte by byte: ``python examples/hf_model.py OUT --text FILE``.

torchrun --nproc-per-node 2 examples/hf_model.py OUT              sharded over two devices, on text made up here
torchrun --nproc-per-node 2 examples/hf_model.py OUT --tp 2       split by the model's own _tp_plan
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accelbridge import Trainer

parser = argparse.ArgumentParser()
parser.add_argument("out", help="folder of the run")
parser.add_argument("--text", type=Path, help="a text file to train on")
parser.add_argument("--tp", type=int, default=1, help="devices that each matrix is split over")
options = parser.parse_args()

text = options.text.read_bytes() if options.text else bytes(i * i % 251 for i in range(10_000))
tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
samples = [{"tokens": t[:-1], "targets": t[1:]} for t in tokens.unfold(0, 65, 64)]

config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
torch.manual_seed(0)  # the same values on every rank
model = LlamaForCausalLM(config)

recipe = {
    "parallel": {"tp": options.tp},
    "train": {"steps": 24, "global_batch_size": 16, "seq_len": 64},
    "optimizer": {"lr": 3e-3, "warmup_steps": 5},
    "output": {"dir": options.out},
}
Trainer(recipe, model=model, data=samples).fit()
