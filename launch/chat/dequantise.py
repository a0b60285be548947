"""Make a Hugging Face checkpoint in bfloat16 of a GGUF file, in its folder: ``python dequantise.py FOLDER FILE``."""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main(folder: str, file: str) -> None:
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(folder)
    dequantised = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.bfloat16, quantization_config=dequantised
    )
    model.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
