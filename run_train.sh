#!/usr/bin/env bash
# Train a model: set up once, prepare the bundled text, train, say where the results are.
#
#   ./run_train.sh                                        the debug Mixture-of-Experts model on 2 CPU ranks
#   CONFIG_FILE=train_configs/mula_7b_a1b.toml NGPU=8 ./run_train.sh --training.steps 1000
#
# CONFIG_FILE  TOML file                       NNODES, NODE_RANK, RDZV_ENDPOINT  several nodes (torchrun's meaning)
# NGPU         ranks on this node              LOG_RANK  ranks that log, comma-separated
# Arguments: any key of the configuration as --section.key value.
set -euo pipefail
cd "$(dirname "$0")"
. scripts/environment.sh ""

CONFIG_FILE=${CONFIG_FILE:-train_configs/mula_debug.toml}
NGPU=${NGPU:-2}
MULA_TITAN=("$PYTHON" -m mula_titan.cli)

for split in train validation; do
    folder=outputs/data/austen-$split
    if [ ! -e "$folder/index.json" ] && grep -q "$folder" "$CONFIG_FILE" 2>/dev/null; then
        "${MULA_TITAN[@]}" tokenize --inputs "assets/austen/$split.jsonl" --output "$folder"
    fi
done

exec "${MULA_TITAN[@]}" train "$CONFIG_FILE" --nproc "$NGPU" "$@"
