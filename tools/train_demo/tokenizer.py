"""Byte-level BPE tokenizer: training, the chat template, and the token cache."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.train_demo.data import END_OF_TEXT, IM_END, MIXTURE, SPECIAL_TOKENS, Document

# A word with its space, one digit, a run of signs with its space, line breaks with the indentation after them.
WORD_PATTERN = r" ?[\p{L}_]+|\p{N}| ?[^\s\p{L}\p{N}_]+|\n+ *|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{- '<|im_start|>assistant\\n' -}}"
    "{%- if enable_thinking is defined and enable_thinking -%}{{- '<think>\\n' -}}"
    "{%- elif enable_thinking is defined -%}{{- '<think>\\n\\n</think>\\n\\n' -}}"
    "{%- endif -%}{%- endif -%}"
)


def train_tokenizer(documents: list[Document], vocab_size: int) -> Tokenizer:
    """Learn merges on the training documents, with each source in about its share of the mixture."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rng = random.Random(0)
    texts: list[str] = []
    for source, share in MIXTURE.items():
        pool = [document.text for document in documents if document.source == source]
        rng.shuffle(pool)
        budget = int(8_000_000 * share)
        for text in pool:
            if budget <= 0:
                break
            texts.append(text)
            budget -= len(text)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_documents(
    tokenizer: Tokenizer, documents: list[Document], seed: int
) -> tuple[dict[str, NDArray[np.uint16]], dict[str, NDArray[np.int64]]]:
    """Per source, one stream of shuffled documents, each followed by ``<|endoftext|>``, and the documents' starts."""
    rng = random.Random(seed)
    end = tokenizer.token_to_id(END_OF_TEXT)
    streams, starts = {}, {}
    for source in MIXTURE:
        texts = [document.text for document in documents if document.source == source]
        rng.shuffle(texts)
        ids: list[int] = []
        offsets: list[int] = []
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            offsets.append(len(ids))
            ids += [*encoding.ids, end]
        streams[source] = np.array(ids, dtype=np.uint16)
        starts[source] = np.array(offsets, dtype=np.int64)
    return streams, starts


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in SPECIAL_TOKENS
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "bos_token": END_OF_TEXT,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
