"""A chain of drafters and its parts: a look-up drafts in repetitive text, the MTP head elsewhere.

Run it with ``python examples/chained_drafters.py``.
"""

import specdec

LOOK_UP = {"name": "ngram", "min_order": 4, "max_order": 4}
CHAIN = {"name": "first_of", "drafters": [LOOK_UP, {"name": "mtp"}]}
PROMPTS = {"repeating": "one two three four\n" * 6, "fresh": "The first railway in the region"}
settings = {"max_new_tokens": 48, "ignore_eos": True}

plain = specdec.load(drafter="none")
drafters = {"look-up": LOOK_UP, "head": "mtp", "chain": CHAIN}
models = {name: specdec.load(drafter=drafter, depth=4) for name, drafter in drafters.items()}

for kind, prompt in PROMPTS.items():
    tokens = plain.generate(prompt, **settings).tokens
    for name, lm in models.items():
        result = lm.generate(prompt, **settings)
        assert result.tokens == tokens  # every drafter gives the output of plain decoding
        stats = result.stats
        print(f"{kind:9} {name:7} {stats.tokens / stats.cycles:.2f} tokens per cycle", end="")
        parts = stats.draft.get("drafters", {})
        print("".join(f", {part}: {counts['drafts']} drafts" for part, counts in parts.items()))
