"""What `foretune recommend` prints can be run as it stands."""

import shlex

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
