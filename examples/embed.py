"""Use specdec in a program: load, generate, stream, stop, keep a session, handle errors.

Run it with ``python examples/embed.py [MODEL]``.
"""

import sys

import specdec

lm = specdec.load(sys.argv[1] if len(sys.argv) > 1 else "demo", depth=2)
print(f"{lm.info.family} on {lm.info.device}, {lm.info.dtype}, {lm.info.parity.value} parity")
for notice in lm.notices:
    print("note:", notice)

# 1. one call
result = lm.generate("def add(a, b):", max_new_tokens=32)
print(f"\n1. {len(result.tokens)} tokens in {result.stats.cycles} cycles, ended by {result.finish_reason!r}")
print(result.text)

# 2. streamed text; stop() may be called from a signal handler or another thread
print("\n2. ", end="")
stream = lm.stream("class Stack:\n    def __init__(self):\n", max_new_tokens=200)
received = 0
for piece in stream:
    print(piece, end="", flush=True)
    received += len(piece)
    if received > 80:
        stream.stop()
print(f"\n   {stream.result.finish_reason} after {len(stream.result.tokens)} tokens")

# 3. a session keeps the state: the second turn runs only its own tokens
session = lm.session()
session.generate("The first railway in the region was opened in 1868 and", max_new_tokens=24)
second = session.generate(" In the year after that", max_new_tokens=24)
print(f"\n3. {second.prompt_tokens} tokens of prompt in the second turn, of which {second.stats.prefilled} were new")
print(session.text)

# 4. every deliberate error is a SpecdecError that says what would work
try:
    lm.generate("hello", max_new_tokens=0)
except specdec.SpecdecError as error:
    print(f"\n4. {type(error).__name__}: {error}")
