"""What the help shows works as it stands. (What pages show: test_pages.py.)"""

import json
import re
import shlex
from pathlib import Path

import click
import pytest
from cli.test_quickstart import take_tiny_model
from data.made import made_tokenizer
from runs.made_run import conversation, write_config, write_rows

from foretune.cli.app import root
from foretune.cli.commands import Command, Group

# Examples are run without network and without a GPU; 3 is the answer "no" to --check.
EXPECTED = {0}
# What the examples read.
FILES = {
    "axolotl.yml": "base_model: Qwen/Qwen2.5-0.5B\nadapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_linear: true\n"
    "datasets: [{path: rows.jsonl, type: chat_template}]\nsequence_len: 1024\nmicro_batch_size: 1\nnum_epochs: 1\n"
    "learning_rate: 2e-4\nwarmup_steps: 0\n",
    "alpaca.json": '[{"instruction": "Add.", "input": "1 + 1", "output": "2"}]',
    "stanford.json": '[{"instruction": "Add.", "input": "1 + 1", "output": "2", "text": "Add. 1 + 1 2"}]',
    "rows.jsonl": '{"instruction": "Add.", "output": "2"}\n',
    "chats.jsonl": '{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}\n',
}


def help_examples() -> list[str]:
    found: list[str] = []
    commands: list[click.Command] = [root]
    for command in commands:
        assert isinstance(command, (Command, Group))
        found += [example.line for example in command.examples]
        if isinstance(command, click.Group):
            context = click.Context(command)
            inner = [command.get_command(context, name) for name in command.list_commands(context)]
            commands += [one for one in inner if one is not None]
    return found


def foretune_words(line: str) -> list[str]:
    """Return the words of the foretune call in a line of shell (inside `eval "$( )"`, or before a redirection)."""
    call = re.search(r"foretune [^>)]*", line)
    assert call is not None
    return shlex.split(call[0])[1:]


def prepare_run(call, words: list[str]) -> None:
    """Make what the examples of these commands are about: a configuration, or a run that ended."""
    write_config(Path("run.yaml"), Path.cwd())
    write_rows(Path("held-out.jsonl"), [conversation(number) for number in range(4)])
    if words[0] in ("evaluate", "merge") or "--resume" in words:
        assert call("train", "run.yaml").code == 0
    if "--resume" in words:
        record = json.loads(Path("runs/first/record.json").read_text())
        Path("runs/first/record.json").write_text(json.dumps({**record, "outcome": "interrupted"}))


@pytest.mark.parametrize("line", help_examples())
def test_help_example_runs(call, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = foretune_words(line)
    if words[0] == "quickstart":
        take_tiny_model(monkeypatch)
    if words[0] in ("train", "evaluate", "merge"):
        prepare_run(call, words)
        called = call(*words)
        assert (called.code, bool(called.out)) == (0, True), called.err
        return
    for name, text in FILES.items():
        Path(name).write_text(text)
    if "./model" in words:
        made_tokenizer("words").save_pretrained("model")
    if words[:2] == ["data", "convert"]:
        Path("rows.jsonl").unlink()
    if words[:2] != ["config", "init"]:
        for name in ("run.yaml", "gpt2.yaml"):
            call("config", "init", name)
    called = call(*words)
    assert called.code in EXPECTED, called.err
    assert called.out
