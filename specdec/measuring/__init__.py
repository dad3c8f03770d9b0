"""Measuring: acceptance by position, what a depth costs and must earn, where a drafter goes wrong.

Above the pipeline, below the command line; nothing here prints.
"""

from specdec.measuring.acceptance import (
    AcceptanceReport,
    AcceptanceRun,
    ClassReport,
    DepthReport,
    PositionReport,
    measure_acceptance,
    summarise,
)
from specdec.measuring.environment import Environment, current_environment
from specdec.measuring.prompts import Prompt, choose_prompts, load_prompts, own_prompts
from specdec.measuring.speed_model import Prediction, Verdict, break_even, expected_tokens, judge

__all__ = [
    "AcceptanceReport",
    "AcceptanceRun",
    "ClassReport",
    "DepthReport",
    "Environment",
    "PositionReport",
    "Prediction",
    "Prompt",
    "Verdict",
    "break_even",
    "choose_prompts",
    "current_environment",
    "expected_tokens",
    "judge",
    "load_prompts",
    "measure_acceptance",
    "own_prompts",
    "summarise",
]
