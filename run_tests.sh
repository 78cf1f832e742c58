#!/usr/bin/env bash
# Lint, type check and test. Arguments go to pytest: ./run_tests.sh tests/data -k order
set -euo pipefail
cd "$(dirname "$0")"
. scripts/environment.sh "[test]" pytest hypothesis transformers lm_eval ruff mypy

export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
exec "$PYTHON" -m pytest "$@"
