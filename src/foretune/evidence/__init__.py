"""What was measured, held against what is predicted: published observations and the accuracy on them."""

from foretune.evidence.accuracy import ScoreReport, Spread, SummaryLine, report_of, spread_of, summarize
from foretune.evidence.compact import compact_lines
from foretune.evidence.merging import MergeCheck, MergedLayer, WeightDtype
from foretune.evidence.observations import OWN_OBSERVATIONS, Observation, parse_observation, read_observations
from foretune.evidence.record import (
    BaseIdentity,
    Check,
    CodeIdentity,
    DataIdentity,
    EvaluationReading,
    Failure,
    Hardware,
    Outcome,
    Padding,
    PhasePair,
    PhaseReading,
    ProbeCheck,
    ProcessIdentity,
    RunRecord,
    Scope,
    encode_record,
    read_record,
)
from foretune.evidence.requests import Asked, Request, request_of
from foretune.evidence.score import METRICS, Engine, Prediction, Refusal, score_rows
from foretune.evidence.stacks import EngineName, StackChoice, choose_stack

__all__ = [
    "METRICS",
    "OWN_OBSERVATIONS",
    "Asked",
    "BaseIdentity",
    "Check",
    "CodeIdentity",
    "DataIdentity",
    "Engine",
    "EngineName",
    "EvaluationReading",
    "Failure",
    "Hardware",
    "MergeCheck",
    "MergedLayer",
    "Observation",
    "Outcome",
    "Padding",
    "PhasePair",
    "PhaseReading",
    "Prediction",
    "ProbeCheck",
    "ProcessIdentity",
    "Refusal",
    "Request",
    "RunRecord",
    "Scope",
    "ScoreReport",
    "Spread",
    "StackChoice",
    "SummaryLine",
    "WeightDtype",
    "choose_stack",
    "compact_lines",
    "encode_record",
    "parse_observation",
    "read_observations",
    "read_record",
    "report_of",
    "request_of",
    "score_rows",
    "spread_of",
    "summarize",
]
