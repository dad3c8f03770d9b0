"""The CUDA backend, measured: ``python -m benchmarks.cuda --help``.

shapes.py        published shapes, bytes per pass, and targets
timing.py        graph replays timed by events, stream-read bandwidth, the state of the card
weights.py       weights made on the device, and language models over them
models.py        whole models: parity gates, times of passes, generations
peers.py         the same models in transformers' ``generate``; the embedded model
report.py        the table of targets, figures and ratios, and the chart
"""
