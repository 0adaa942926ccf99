"""The command line: parse arguments, ask the rooms, draw the answer."""

from foretune.cli.app import main

__all__ = ["main"]
