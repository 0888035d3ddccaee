"""``python -m tests.support.somebody -m pytest FILE``: Python with these words, by root started as another user.

That user may read everything, and writes to the folder for temporary files alone.
"""

import os
import sys
import tempfile

from tests.support.hostile import as_somebody

if __name__ == "__main__":
    os.environ.update(
        HOME="/nonexistent",
        PYTHONDONTWRITEBYTECODE="1",
        HYPOTHESIS_STORAGE_DIRECTORY=os.path.join(tempfile.gettempdir(), "hypothesis-of-somebody"),
        PYTEST_ADDOPTS="-p no:cacheprovider",
    )
    command = [*as_somebody(), sys.executable, *sys.argv[1:]]
    os.execvp(command[0], command)
