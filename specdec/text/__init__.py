"""Tokens to text and back: tokenizers, chat templates, incremental decoding and stop strings."""

from specdec.text.tokenizer import ChatTemplate, IncrementalDecoder, StopMatcher, Tokenizer

__all__ = ["ChatTemplate", "IncrementalDecoder", "StopMatcher", "Tokenizer"]
