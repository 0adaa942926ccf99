"""Write a file of observations in the project's own form: parts that many rows share once, what nothing needs left out.

    python scripts/observations.py IN.jsonl OUT.jsonl

IN has the public form, one observation a line (docs/observations.md). Every row is read back from OUT and compared.
"""

import json
import sys
from pathlib import Path

from foretune.evidence import compact_lines, read_observations


def main() -> int:
    """Convert a file. Returns 1 where a row would be read as something else."""
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    with source.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    target.write_bytes(b"".join(compact_lines(rows)))
    differ = [a.id for a, b in zip(read_observations(source), read_observations(target), strict=True) if a != b]
    print(f"{len(rows)} rows, {target.stat().st_size:,} bytes, {len(differ)} read differently {differ[:5] or ''}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
