"""Write files of observations as one in the project's own form: parts that many rows share once, the unneeded left out.

    python scripts/observations.py IN.jsonl [IN.jsonl ...] OUT.jsonl

Each IN has the public form, one observation a line (docs/observations.md). Every row is read back from OUT and
compared.
"""

import json
import sys
from itertools import chain
from pathlib import Path

from foretune.evidence import compact_lines, read_observations


def main() -> int:
    """Convert files. Returns 1 where a row would be read as something else."""
    *sources, target = (Path(name) for name in sys.argv[1:])
    rows = [json.loads(line) for source in sources for line in source.read_text(encoding="utf-8").splitlines()]
    target.write_bytes(b"".join(compact_lines(rows)))
    whole = chain.from_iterable(map(read_observations, sources))
    differ = [a.id for a, b in zip(whole, read_observations(target), strict=True) if a != b]
    print(f"{len(rows)} rows, {target.stat().st_size:,} bytes, {len(differ)} read differently {differ[:5] or ''}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
