"""Quantise a plain checkpoint when it is loaded, and compare the models.

Run it with ``python examples/quantise_at_load.py [MODEL]``.
"""

import sys

import specdec

PROMPTS = ("def area(width, height):", "import os\n", "class Stack:\n    def push(self, item):\n")
model = sys.argv[1] if len(sys.argv) > 1 else "demo"

original = specdec.load(model)
texts = [original.generate(prompt, max_new_tokens=24).tokens for prompt in PROMPTS]
for weights in ("int8", "int4"):
    lm = specdec.load(model, weights=weights)
    plain = specdec.load(model, weights=weights, drafter="none")
    same = total = 0
    for prompt, wanted in zip(PROMPTS, texts, strict=True):
        result = lm.generate(prompt, max_new_tokens=24)
        assert result.tokens == plain.generate(prompt, max_new_tokens=24).tokens  # speculation changes nothing
        same += sum(ours == theirs for ours, theirs in zip(result.tokens, wanted, strict=False))
        total += len(wanted)
    print(f"{lm.info.weights}\n  {same} of {total} tokens are those of the original")
