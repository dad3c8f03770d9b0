"""How a token comes to be: the cycle, who runs it, sessions, and what a generation gives."""
