"""Compare the training model with transformers: ``python -m tools.train_demo.check``; exits 1 on a mismatch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tools.train_demo.decode import generate
from tools.train_demo.export import load_model
from tools.train_demo.prepare import DEFAULT_EXPORT

LIMIT = 1e-3  # float32 over 12 layers; the two models chunk the recurrence differently
TEXT = "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n12 + 30 = 42. The sum is 42.<|im_end|>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_EXPORT)
    folder = parser.parse_args().model
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = torch.tensor([tokenizer.encode(TEXT * 4).ids])
    ours = load_model(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        own_logits = ours.logits(ours.hidden_states(tokens)[0])
        reference = theirs(tokens).logits
    relative = ((own_logits - reference).abs().max() / reference.abs().max()).item()
    agree = (own_logits.argmax(-1) == reference.argmax(-1)).float().mean().item()
    print(f"{tokens.shape[1]} tokens: max |difference| / max |logit| = {relative:.2e}, argmax agreement {agree:.4f}")

    prompt = tokens[:, :24]
    greedy = generate(ours, prompt, 32, torch.zeros(1))
    with torch.no_grad():
        again = ours.logits(ours.hidden_states(greedy)[0]).argmax(-1)
    same = (again[:, 23:-1] == greedy[:, 24:]).float().mean().item()
    print(f"step-by-step decoding against one pass: {same:.4f} of the tokens equal")
    if relative > LIMIT or agree < 1.0:
        sys.exit("the two models differ")


if __name__ == "__main__":
    main()
