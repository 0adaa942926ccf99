"""`python -m foretune`."""

from foretune.cli import main

main()
