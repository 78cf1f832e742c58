"""Data pipeline: text -> token shards (`tokenize`) -> batches in a resumable global order (`loader`).

Read in this order: `shards` (the files), `tokenize` with `shard_worker` and `documents` (who write them),
`token_files` (who reads them, raw files too), `order` (which window is sample i), `loader` (torchtitan's data loader).
"""

import logging

# grain warns at import that there is no jax profiler; nobody here uses one.
logging.getLogger("absl").setLevel(logging.ERROR)
