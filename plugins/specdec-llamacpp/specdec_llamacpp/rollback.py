"""Recurrent states in llama.cpp: they can drop rejected tokens only if snapshots of them are kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from specdec.errors import UnsupportedError


@contextlib.contextmanager
def recurrent_rollback(depth: int) -> Iterator[None]:
    """Within the block, ``Llama(...)`` keeps ``depth`` snapshots of recurrent states (``n_rs_seq``).

    ``Llama`` has no argument for it, so the default of its context parameters is changed. Threads that make a ``Llama``
    at the same time get the snapshots too.
    """
    from llama_cpp import llama_cpp as bindings

    given = bindings.llama_context_default_params

    def with_snapshots() -> Any:
        params = given()
        params.n_rs_seq = depth
        return params

    bindings.llama_context_default_params = with_snapshots
    try:
        yield
    finally:
        bindings.llama_context_default_params = given


def check_rollback(llm: Any, depth: int) -> None:
    """See whether the model's memory drops tokens from its end; attention always does.

    A recurrent memory is asked to drop its last token, which is then computed again.

    Raises: UnsupportedError if it does not.
    """
    if not (llm._is_recurrent or llm._is_hybrid):
        return
    from llama_cpp import llama_cpp as bindings

    last = llm.n_tokens - 1
    snapshots = int(bindings.llama_n_rs_seq(llm._ctx.ctx))
    if snapshots < depth or not llm._ctx.kv_cache_seq_rm(-1, last, -1):
        raise UnsupportedError(
            f"the model keeps a recurrent state with {snapshots} snapshots, which cannot drop {depth} rejected tokens",
            try_=f"with recurrent_rollback({depth}): Llama(...), if llama.cpp can roll back this model",
        )
    token = int(llm.input_ids[last])
    llm.n_tokens = last
    llm.eval([token])
