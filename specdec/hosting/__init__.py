"""Run specdec's drafters in other engines (hosts), and record what they were asked and what they drafted.

A host runs the target and decides what stays; a ``HostedDrafter`` gives it drafts that are safe to verify. The packages
``specdec-vllm``, ``specdec-transformers`` and ``specdec-llamacpp`` put one behind their host's extension point.
"""

from specdec.hosting.choosing import chosen_drafter, chosen_tokenizer
from specdec.hosting.drafting import Costs, HostedDrafter, hosted_part, named_part
from specdec.hosting.engines import host_info, supported
from specdec.hosting.recorded import Difference, RecordedRun, RecordedTarget, recorded_part, replay
from specdec.hosting.sessions import HostSession, HostSessions
from specdec.hosting.traces import Round, StreamTrace, Trace, TracedRequest, TraceWriter, read_trace

__all__ = [
    "Costs",
    "Difference",
    "HostSession",
    "HostSessions",
    "HostedDrafter",
    "RecordedRun",
    "RecordedTarget",
    "Round",
    "StreamTrace",
    "Trace",
    "TraceWriter",
    "TracedRequest",
    "chosen_drafter",
    "chosen_tokenizer",
    "host_info",
    "hosted_part",
    "named_part",
    "read_trace",
    "recorded_part",
    "replay",
    "supported",
]
