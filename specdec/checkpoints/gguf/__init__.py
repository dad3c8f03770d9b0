"""Read GGUF files: one file that holds a model's config, tokenizer and quantised weights."""
