"""A stand-in for the model, with the shape of the real one's results."""

from __future__ import annotations

import os
import signal

import attrs

from specdec.contract import Deviation, Guarantee, Parity
from specdec.errors import PromptError


@attrs.define
class FakeResult:
    told: dict

    def to_dict(self):
        return self.told


class FakeStream:
    """Says the words of the prompt again, one per cycle, until the limit or until it is asked to stop."""

    def __init__(self, lm, words):
        self.lm, self.words, self.stopping, self.said = lm, words, False, []

    def stop(self):
        self.stopping = True

    def __iter__(self):
        for word in self.words:
            if self.stopping:
                break
            self.said.append(word)
            yield f"{word} "
            if word in self.lm.interrupts:  # Ctrl-C, as the terminal sends it
                os.kill(os.getpid(), signal.SIGINT)

    @property
    def result(self):
        cycles, active = len(self.said), self.lm.config.drafter.name != "none"
        stats = {
            "cycles": cycles,
            "offered": [cycles, cycles] if active else [],
            "reached": [cycles, 2] if active else [],
            "accepted": [2, 1] if active else [],
            "tokens_per_second": 123.456,
            "seconds": {"prefill": 0.1, "draft": 0.2, "verify": 0.3, "commit": 0.4},
            "depth": {"2": cycles},
            "draft": {},
            "prediction": {"offered": 0, "accepted": 0},
            "speculation": {
                "active": active,
                "drafter": self.lm.config.drafter.name,
                "reason": "" if active else "drafter 'none' was chosen",
            },
        }
        return FakeResult(
            {
                "tokens": list(range(len(self.said))),
                "text": "".join(f"{word} " for word in self.said),
                "finish_reason": "interrupted" if self.stopping else "length",
                "prompt_tokens": 7,
                "guarantee": Guarantee.EXACT.value,
                "parity": Parity.BITWISE.value,
                "deviation": attrs.asdict(Deviation()),
                "stats": stats,
                "generation": {"temperature": self.lm.config.generation.temperature, "seed": 7},
                "notices": ["[not markup] slow kernels"],
            }
        )


class FakeTokenizer:
    has_chat_template = True

    def encode_messages(self, messages):
        return [f"{message['role']}: {message['content']}" for message in messages]


class FakeModel:
    def __init__(self, config, interrupts=()):
        self.config, self.interrupts, self.asked, self.tokenizer = config, interrupts, [], FakeTokenizer()

    def stream(self, prompt, *, prediction=None):
        if not prompt:
            raise PromptError("the prompt is empty", **{"try": "at least one character"})
        self.asked.append(prompt)
        self.prediction = prediction
        words = prompt.split() if isinstance(prompt, str) else [str(token) for token in prompt]
        return FakeStream(self, words[: self.config.generation.max_new_tokens])
