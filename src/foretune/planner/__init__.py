"""What to run: candidate configurations, the best of them for an objective, and why."""

from foretune.planner.boundary import BOUNDARIES, Boundary, find_boundary
from foretune.planner.carriers import Carrier, Carriers, find_carriers
from foretune.planner.frontier import Frontier, FrontierLine, FrontierPoint, find_frontier
from foretune.planner.plans import Plan, Recommendation, Rejected, recommend_plans
from foretune.planner.space import OBJECTIVES, Objective, Space

__all__ = [
    "BOUNDARIES",
    "OBJECTIVES",
    "Boundary",
    "Carrier",
    "Carriers",
    "Frontier",
    "FrontierLine",
    "FrontierPoint",
    "Objective",
    "Plan",
    "Recommendation",
    "Rejected",
    "Space",
    "find_boundary",
    "find_carriers",
    "find_frontier",
    "recommend_plans",
]
