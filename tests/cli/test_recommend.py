"""What `foretune recommend` prints can be run as it stands."""

import shlex
from pathlib import Path

import pytest

ASKED = (
    (),
    ("--method", "full", "--accumulation", "2"),
    ("--alpha", "8", "--targets", "attention"),
    ("--stack", "trl", "--attention", "eager", "--method", "lora"),
    ("--set", "batch.sequence_length=512", "--set", "lora.dropout=0.1", "--objective", "largest-batch"),
)


@pytest.mark.parametrize("words", ASKED, ids=" ".join)
def test_the_command_of_a_plan_estimates_that_plan(call, words: tuple[str, ...]) -> None:
    asked = ("recommend", "--model", "gpt2", "--gpu", "RTX 3060 12GB", "--offline", *words)
    plans = call(*asked, "--json").document["plans"]
    blocks = call(*asked).out.split("\nPlan ")[1:]
    assert len(plans) == len(blocks) > 0
    for plan, block in zip(plans, blocks, strict=True):
        lines = [line for line in block.split("\n\n")[0].splitlines() if line.startswith("    ")]
        command = shlex.split(" ".join(lines[[line.strip()[:8] for line in lines].index("foretune") :]))
        found = call(*command[1:], "--json").document
        assert found["config"] == plan["config"]
        assert found["need_bytes"] == plan["estimate"]["need_bytes"]


def test_the_flags_of_a_plan_write_its_recipe(call, tmp_path: Path) -> None:
    asked = ("recommend", "--model", "gpt2", "--gpu", "RTX 3060 12GB", "--offline", "--method", "lora")
    (plan,) = call(*asked, "--json").document["plans"]
    (block,) = call(*asked).out.split("\nPlan ")[1:]
    command = shlex.split(" ".join(block[block.index("foretune estimate") :].split("\n\n")[0].split()))
    written = call("recipe", str(tmp_path / "r"), *command[2:], "--json").document
    settings = {name: value for name, value in plan["config"].items() if name not in ("data", "output")}
    assert settings.items() <= written["config"].items()
    assert "with the flags of a plan writes it out" in " ".join(call(*asked).out.split())
