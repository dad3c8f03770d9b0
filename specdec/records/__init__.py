"""What is known about this machine: its facts, cost tables kept between processes, and comparisons of bits."""
