"""Sampling with a seed: speculation does not change the sample. Also shows log-probabilities of the chosen tokens.

Run it with ``python examples/sampling.py``.
"""

import specdec

PROMPT = "The first railway in the region"
settings = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1, "max_new_tokens": 32}

plain = specdec.load(drafter="none")
speculative = specdec.load(drafter="mtp", depth=3)

for seed in range(3):
    alone = plain.generate(PROMPT, seed=seed, **settings)
    together = speculative.generate(PROMPT, seed=seed, **settings)
    stats = together.stats
    same = "the same tokens" if alone.tokens == together.tokens else "OTHER TOKENS"
    print(f"seed {seed}: {same} with {stats.cycles} cycles instead of {alone.stats.cycles}, accepted {stats.accepted}")
    print(f"  {together.text!r}")
    if alone.tokens != together.tokens and together.parity == "bitwise":
        raise SystemExit("speculation changed the sample")

# the ratio rule has the same distribution but different noise, so it gives another, equally valid sample
ratio = specdec.load(drafter="mtp", depth=3, verifier="rejection")
print(f"rejection: {ratio.generate(PROMPT, seed=0, **settings).text!r}")

# log-probabilities are the model's own, before temperature and filters
for entry in speculative.generate(PROMPT, seed=0, logprobs=3, **settings).logprobs[:4]:
    best = ", ".join(f"{speculative.tokenizer.decode([token])!r} {logprob:.2f}" for token, logprob in entry.top)
    print(f"{speculative.tokenizer.decode([entry.token])!r} {entry.logprob:.2f}  best: {best}")
