"""``python -I -S ask.py SOCKET HOST COMMAND``: what mpirun calls in place of ssh, and asks the supervisor's desk.

Imports nothing of the package: it has to be quick, and is started once for each node.
"""

import json
import os
import socket
import struct
import sys

HEAD = struct.Struct("!BII")


def main() -> int:
    """Shows the command's output; its exit code, or 255 if the node was lost, as ssh would."""
    path, host, command = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as stream, stream.makefile("rb") as answers:
        folder = os.open(os.path.dirname(path), os.O_PATH)  # addresses of sockets have at most 107 bytes
        stream.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
        stream.sendall(json.dumps({"host": host, "command": command}).encode() + b"\n")
        while len(head := answers.read(HEAD.size)) == HEAD.size:
            kind, _, length = HEAD.unpack(head)
            content = answers.read(length)
            if kind == 0:
                return int(content)
            while content:
                content = content[os.write(kind, content) :]
    return 255


if __name__ == "__main__":
    sys.exit(main())
