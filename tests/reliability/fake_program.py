"""Stands in for mula-titan on a node: notes its call, then does what the plan says for its host and attempt."""

import json
import os
import signal
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
command, words = sys.argv[2], sys.argv[3:]
host = os.environ["MULA_TITAN_HOST"]
calls = folder / f"{command}-{host}"
attempt = len(calls.read_text().splitlines()) if calls.exists() else 0
with calls.open("a") as file:
    file.write(json.dumps({"words": words, "node_rank": os.environ.get("NODE_RANK")}) + "\n")
plan = json.loads((folder / "plan.json").read_text()).get(f"{command} {host}", [0])
action = plan[min(attempt, len(plan) - 1)]
if "--good-hosts" in words:
    good = json.loads((folder / "plan.json").read_text())["good"]
    Path(words[words.index("--good-hosts") + 1]).write_text("\n".join(good))
if action == "blame itself":
    with (folder / "bad_nodes.txt").open("a") as file:
        file.write(f"{host}  # replay differed\n")
    action = 73
if action == "wait for a signal":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    (folder / f"ready-{host}").touch()
    time.sleep(60)
if action == "hang":
    time.sleep(60)
    (folder / f"stayed-{host}").touch()
sys.exit(action)
