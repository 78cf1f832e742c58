"""Shared by all tests: mula_titan comes before torchtitan, one thread, no network."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import mula_titan.runtime

mula_titan.runtime.select_device()
