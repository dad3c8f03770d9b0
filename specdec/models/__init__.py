"""Model families, written once over Ops: ``decoder.py`` has the pieces, ``qwen3_5.py`` and others put them together."""
