"""An OpenAI-compatible server for one machine and few users."""
