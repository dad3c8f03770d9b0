"""Measure a pipeline: acceptance by position, speed against plain decoding, and replays that compare tokens.

Nothing here prints; ``specdec.cli`` shows the reports.
"""

from specdec.measuring.acceptance import AcceptanceMeasurement, measure_acceptance
from specdec.measuring.prompts import Prompt, choose_prompts, load_prompts, own_prompts
from specdec.measuring.speed_model import Advice

__all__ = [
    "AcceptanceMeasurement",
    "Advice",
    "Prompt",
    "choose_prompts",
    "load_prompts",
    "measure_acceptance",
    "own_prompts",
]
