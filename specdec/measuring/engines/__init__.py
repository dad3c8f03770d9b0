"""Engines that an audit asks: specdec's own, others in this process, and servers that speak OpenAI's protocol."""
