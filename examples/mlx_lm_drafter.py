"""A drafter of specdec in mlx-lm, as an object that poses as its draft model. mlx-lm offers no place for drafters.

mlx-lm calls its draft model with the tokens that are new, and takes the next draft token from the logits. Nothing
promises that it will go on doing so: this works with mlx-lm 0.32.2. In a clone of the repository, on a Mac:

    pip install -c constraints.txt . plugins/specdec-suffix mlx-lm    # on Linux also: 'mlx[cpu]'
    python examples/mlx_lm_drafter.py

What it costs: every pass verifies ``num_draft_tokens``, also where the drafter has no opinion, and one call of Python
for each. Models whose cache cannot drop tokens are refused by mlx-lm, but sliding windows only until they are full:
do not use this with them.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from specdec.config import Choice
from specdec.hosting import HostedDrafter, host_info


class History:
    """The tokens of one text, where a model has its cache."""

    state: tuple[()] = ()  # no arrays to evaluate

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def is_trimmable(self) -> bool:
        return True

    def trim(self, count: int) -> int:
        """Forget the last tokens."""
        del self.tokens[len(self.tokens) - count :]
        return count


class PosedDraftModel:
    """A drafter as ``draft_model`` of ``mlx_lm.generate`` and ``stream_generate``.

    Args:
        drafter: its name and options, such as ``{"name": "suffix"}``; one that needs tokens only.
        vocab_size: of the model that verifies.
        depth: the ``num_draft_tokens`` that mlx-lm is called with.
        tokenizer: of that model, for drafters with a model of their own.
        trace: a file to record drafts and commits in.
    """

    def __init__(
        self, drafter: dict[str, Any], vocab_size: int, depth: int, *, tokenizer: Any = None, trace: str | None = None
    ) -> None:
        options = dict(drafter)
        info = host_info("mlx-lm", vocab_size, 2**31 - 1)
        self.hosted = HostedDrafter(Choice(options.pop("name"), options), info, tokenizer=tokenizer, trace=trace)
        self._vocab_size, self._depth = vocab_size, depth
        self._base = 0  # committed tokens, when the draft was made
        self._draft: list[int] = []

    def make_cache(self) -> list[History]:
        return [History()]

    def __call__(self, fed: mx.array, cache: Sequence[History]) -> mx.array:
        """Logits ``[1, T, V]`` after the tokens ``fed`` ``[1, T]``: 0 for the next draft token, -inf for others."""
        history, new = cache[0].tokens, fed[0].tolist()
        drafted = len(history) - self._base
        continues = 0 <= drafted < len(self._draft) and new == [self._draft[drafted]]
        history += new
        if len(new) > 2:  # a prompt; nobody reads these logits
            return mx.zeros((1, len(new), self._vocab_size))
        if not continues:
            self._base, drafted = len(history), -1
            self._draft = self.hosted.one(history, self._depth)
        if drafted + 1 >= len(self._draft):
            self._draft.append(history[-1])  # no opinion; mlx-lm takes no empty draft
        logits = mx.full((self._vocab_size,), -mx.inf)
        logits[self._draft[drafted + 1]] = 0.0
        return mx.broadcast_to(logits, (1, len(new), self._vocab_size))


if __name__ == "__main__":  # a toy; for a model: mlx_lm.generate(..., draft_model=posed, num_draft_tokens=4)
    from mlx_lm.generate import generate_step, speculative_generate_step
    from mlx_lm.models.llama import Model, ModelArgs

    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = Model(ModelArgs(model_type="llama", vocab_size=500, rms_norm_eps=1e-5, **shape))
    posed = PosedDraftModel({"name": "ngram", "min_order": 1}, model.args.vocab_size, depth=4)
    prompt = mx.array([5, 6, 7, 8] * 4)
    plain = [int(token) for token, _ in generate_step(prompt, model, max_tokens=64)]
    made = speculative_generate_step(prompt, model, posed, num_draft_tokens=4, max_tokens=64)
    assert [token for token, _, _ in made] == plain
    print("the plain output; accepted by position:", posed.hosted.report()["accepted"])
