"""The logits processors that come with specdec."""
