"""``python -m tests.again``: run the tests that failed in the last run of pytest once more, alone.

For the gate, whose two cores may be shared: a launch that times out because of other load is not a defect. Tests that
pass now are named; one that is named twice must be fixed. If tests of many files failed, they are not tried again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CACHE = Path(".pytest_cache/v/cache/lastfailed")
MOST_FILES = 3


def main() -> int:
    """Run them; return 0 if all pass now."""
    failed = sorted(json.loads(CACHE.read_text())) if CACHE.exists() else []
    files = {name.partition("::")[0] for name in failed}
    if not failed or len(files) > MOST_FILES:
        print(f"tests of {len(files)} files failed: not tried again")
        return 1
    code = subprocess.run([sys.executable, "-m", "pytest", "-v", *failed], check=False).returncode
    if not code:
        print(f"passed only the second time, alone: {', '.join(failed)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
