"""Recipe for the demonstration model: data, tokenizer, model, training, export and acceptance."""
