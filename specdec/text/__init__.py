"""Tokens to text and back: tokenizers, chat templates, incremental decoding and stop strings."""

from specdec.text.chat_template import ChatTemplate
from specdec.text.incremental import IncrementalDecoder, StopMatcher, token_bytes
from specdec.text.tokenizer import Tokenizer, common_prefix

__all__ = ["ChatTemplate", "IncrementalDecoder", "StopMatcher", "Tokenizer", "common_prefix", "token_bytes"]
