"""`foretune data`: the rows that are trained on."""

from foretune.cli.commands import Example, Group, LazyCommand

__all__ = ["data"]

data = Group(
    name="data",
    help="The rows that are trained on: JSONL, an instruction or a conversation a line.",
    lazy={
        "check": LazyCommand("foretune.cli.data_check", "check_command", "What rows hold, and what is learnt of them."),
        "convert": LazyCommand("foretune.cli.data_convert", "convert_command", "Make rows of another format ours."),
    },
    examples=[
        Example("What would be learnt from these rows?", "foretune data check rows.jsonl --model ./model"),
        Example("An Alpaca file", "foretune data convert --from alpaca alpaca.json rows.jsonl"),
        Example("Conversations of ShareGPT", "foretune data convert --from sharegpt chats.jsonl rows.jsonl"),
    ],
)
