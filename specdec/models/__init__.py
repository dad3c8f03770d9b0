"""Model families, written once over Ops. Start with ``decoder.py`` (the pieces), then a family such as ``qwen3_5.py``."""
