"""The border to Transformers: what it says is kept, also where it is imported inside."""

import os
import subprocess
import sys

IMPORTED_INSIDE = """
import logging
from foretune.runtime.border import quietly

with quietly() as said:
    with quietly() as inner:
        import transformers

        logger = logging.getLogger("transformers.some.module")
        logger.warning("said deep inside")
    logger.warning("said inside")
logger.warning("said outside")
root = logging.getLogger("transformers")
print(said, inner, len(root.handlers), root.propagate)
"""


def test_a_library_imported_inside_the_border_speaks_only_outside_of_it() -> None:
    """In a fresh process, where Transformers sets its logger up while it is listened to."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED_INSIDE], capture_output=True, text=True, check=True, env=environment()
    )
    assert done.stderr == "[transformers] said outside\n"
    assert done.stdout == "['said inside'] ['said deep inside'] 1 False\n"


def environment() -> dict[str, str]:
    """This environment, without CI, where Transformers passes its messages on to other loggers."""
    return {name: value for name, value in os.environ.items() if name != "CI"}
