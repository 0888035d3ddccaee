"""``python -m tests.support.somebody -m pytest FILE``: runs Python with these arguments, as another user if root.

That user may read everything, but writes only to the folder for temporary files.
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
