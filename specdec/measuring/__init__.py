"""Measure a pipeline: acceptance by position, speed against plain decoding, and replays that compare tokens.

Nothing here prints; ``specdec.cli`` shows the reports.
"""

from specdec.measuring.acceptance import (
    AcceptanceMeasurement,
    AcceptanceReport,
    ClassReport,
    DepthReport,
    PositionReport,
    measure_acceptance,
    summarise,
)
from specdec.measuring.environment import Environment, current_environment
from specdec.measuring.prompts import Prompt, choose_prompts, load_prompts, own_prompts
from specdec.measuring.speed_model import Advice, Prediction, advise, break_even, expected_tokens

__all__ = [
    "AcceptanceMeasurement",
    "AcceptanceReport",
    "Advice",
    "ClassReport",
    "DepthReport",
    "Environment",
    "PositionReport",
    "Prediction",
    "Prompt",
    "advise",
    "break_even",
    "choose_prompts",
    "current_environment",
    "expected_tokens",
    "load_prompts",
    "measure_acceptance",
    "own_prompts",
    "summarise",
]
