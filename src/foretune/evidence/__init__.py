"""What was measured, held against what is predicted: published observations and the accuracy on them."""

from foretune.evidence.accuracy import ScoreReport, Spread, SummaryLine, report_of, spread_of, summarize
from foretune.evidence.compact import compact_lines
from foretune.evidence.observations import OWN_OBSERVATIONS, Observation, parse_observation, read_observations
from foretune.evidence.requests import Asked, Request, request_of
from foretune.evidence.score import METRICS, Engine, Prediction, Refusal, score_rows
from foretune.evidence.stacks import EngineName, StackChoice, choose_stack

__all__ = [
    "METRICS",
    "OWN_OBSERVATIONS",
    "Asked",
    "Engine",
    "EngineName",
    "Observation",
    "Prediction",
    "Refusal",
    "Request",
    "ScoreReport",
    "Spread",
    "StackChoice",
    "SummaryLine",
    "choose_stack",
    "compact_lines",
    "parse_observation",
    "read_observations",
    "report_of",
    "request_of",
    "score_rows",
    "spread_of",
    "summarize",
]
