"""Model families over Ops: ``decoder.py`` has the building blocks, ``qwen3_5.py`` and others assemble them."""
