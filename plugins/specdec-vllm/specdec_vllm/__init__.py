"""specdec-vllm: specdec's drafters in vLLM, as ``speculative_config["model"] = "specdec_vllm.Proposer"``."""

from specdec_vllm.proposer import Proposer

__all__ = ["Proposer"]
