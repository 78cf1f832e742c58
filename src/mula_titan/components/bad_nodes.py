"""Names of hosts, and the list of those that a job should leave out."""

import os
import socket
from pathlib import Path

BAD_NODES = "bad_nodes.txt"
"""In the dump folder: a host a line, with the reason behind it. The launcher leaves these hosts out."""

HOST_VARIABLE = "MULA_TITAN_HOST"
"""Environment variable with this host's name as the launcher's list has it."""


def host_name() -> str:
    """This host, as the launcher's node list calls it."""
    return os.environ.get(HOST_VARIABLE) or socket.gethostname()


def read_bad_nodes(path: Path) -> list[str]:
    """Hosts of a bad-node list; none if there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [host for line in lines if (host := line.split("#")[0].strip())]
