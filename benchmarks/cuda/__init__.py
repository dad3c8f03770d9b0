"""The CUDA backend, measured: ``python -m benchmarks.cuda --help``.

shapes.py        published shapes, bytes per pass, targets and predictions
static.py        compiled kernels without a device, and the decode that a cost model predicts from them
timing.py        graph replays timed by events, stream-read bandwidth, the state of the card
weights.py       weights made on the device, and language models over them
record.py        the JSON file, updated after every figure
kernels.py       the kernels: cases, their checks and their times
others.py        kernels outside these shapes: quantised, experts, latent attention, sampling
models.py        whole models: parity gates, times of passes, generations
peers.py         the same models in transformers' ``generate``; the embedded model
report.py        the table of targets, figures and ratios, and the chart
"""
