"""specdec-llamacpp: specdec's drafters in llama-cpp-python, ``Llama(..., draft_model=SpecdecDraft("ngram"))``."""

from specdec_llamacpp.draft import SpecdecDraft
from specdec_llamacpp.rollback import recurrent_rollback

__all__ = ["SpecdecDraft", "recurrent_rollback"]
