"""Run specdec's drafters in other engines (hosts), and record what they were asked and what they drafted.

A host runs the target and decides what stays; a ``HostedDrafter`` gives it drafts that are safe to verify. The packages
``specdec-vllm``, ``specdec-transformers`` and ``specdec-llamacpp`` put one behind their host's extension point.
"""

from specdec.hosting.choosing import chosen_drafter, chosen_tokenizer
from specdec.hosting.drafting import HostedDrafter, named_part, recorded_drafter, replay
from specdec.hosting.engines import host_info, supported
from specdec.hosting.traces import Round, Trace, TracedRequest, TraceWriter, read_trace

__all__ = [
    "HostedDrafter",
    "Round",
    "Trace",
    "TraceWriter",
    "TracedRequest",
    "chosen_drafter",
    "chosen_tokenizer",
    "host_info",
    "named_part",
    "read_trace",
    "recorded_drafter",
    "replay",
    "supported",
]
