"""Plans as a notebook shows them."""

from typing import TYPE_CHECKING

from foretune.memory.notebook import need_bar, show_estimate
from foretune.pictures import Html, card, figures_table, folded, paragraph
from foretune.units import format_bytes

if TYPE_CHECKING:
    from foretune.planner.plans import Plan, Recommendation

__all__ = ["show_plan", "show_recommendation"]

HEADINGS = ("plan", "method", "rows x tokens", "recompute", "loss", "optimizer", "need", "verdict")


def show_plan(plan: "Plan") -> str:
    """Return a plan as HTML that stands alone: its figures, and why it has its place."""
    return show_estimate(plan.estimate, plan.fit, title=_title(plan), remarks=tuple(f"Why: {why}" for why in plan.why))


def show_recommendation(found: "Recommendation") -> str:
    """Return all plans as HTML that stands alone: a table, and each with its bar."""
    shown = found.plans or found.nearest_misses
    budget = "" if found.budget_bytes is None else f" for {format_bytes(found.budget_bytes)}"
    what = "Plans" if found.plans else "No plan fits; the nearest misses"
    kinds = " and ".join(sorted({plan.estimate.kind for plan in shown}))
    pieces = [figures_table(f"{what}{budget} ({kinds})", HEADINGS, map(_row, shown))] if shown else []
    pieces += [_opened(plan) for plan in shown]
    counted = f"{found.considered:,} candidates considered, {found.walked:,} walked, {found.replayed:,} replayed."
    reasons = [f"{each.count:,}: {each.reason}" for each in found.rejected]
    pieces.append(folded(counted, *map(paragraph, (*reasons, *found.refused))))
    model = shown[0].config.model.id if shown else "no model"
    return card(f"{model}: {found.objective}", *pieces)


def _row(plan: "Plan") -> tuple[str | Html, ...]:
    config, batch = plan.config, plan.config.batch
    return (
        f"{plan.rank:,}",
        plan.method,
        f"{batch.micro_batch_size:,} x {batch.sequence_length:,}",
        "yes" if config.gradient_checkpointing else "no",
        config.loss,
        config.optimizer.name,
        format_bytes(plan.estimate.need_bytes),
        "no device" if plan.fit is None else plan.fit.verdict,
    )


def _opened(plan: "Plan") -> str:
    reasons = [paragraph(f"Why: {why}") for why in plan.why]
    return f"{paragraph(_title(plan))}{need_bar(plan.estimate, plan.fit)}{''.join(reasons)}"


def _title(plan: "Plan") -> str:
    batch = plan.config.batch
    size = f"{batch.micro_batch_size:,} x {batch.sequence_length:,} tokens"
    return f"Plan {plan.rank:,}: {plan.config.model.id}, {plan.method}, {plan.config.precision.dtype}, {size}"
