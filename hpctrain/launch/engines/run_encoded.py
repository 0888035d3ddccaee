"""``python -I -S run_encoded.py HEX``: becomes a shell that runs the command line encoded in hexadecimal digits."""

import os
import sys

if __name__ == "__main__":
    os.execl("/bin/sh", "sh", "-c", os.fsdecode(bytes.fromhex(sys.argv[1])))
