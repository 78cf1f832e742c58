# Sourced by run_train.sh and run_tests.sh: sets PYTHON to an interpreter that has mula_titan and the named modules.
# An active environment that has them is used as it is; else .venv is made here, once for each pyproject.toml.
# usage: . scripts/environment.sh EXTRAS MODULE...      (EXTRAS: "" or "[test]")

mula_titan_has() {  # INTERPRETER MODULE...
    local interpreter=$1
    shift
    (cd / && "$interpreter" - "$@") 2>/dev/null <<'PY'
import importlib.util, sys
sys.exit(not all(importlib.util.find_spec(name) for name in sys.argv[1:]))
PY
}

mula_titan_environment() {  # EXTRAS MODULE...
    local extras=$1 stamp
    shift
    PYTHON=$(command -v python3 || command -v python)
    mula_titan_has "$PYTHON" mula_titan "$@" && return
    PYTHON=$PWD/.venv/bin/python
    stamp=.venv/installed-$(cksum < pyproject.toml | cut -d' ' -f1)
    if [ ! -e "$stamp" ] || ! mula_titan_has "$PYTHON" mula_titan "$@"; then
        echo "Setting up .venv (once; torch and its libraries take a few minutes and 6 GB)..."
        [ -x "$PYTHON" ] || python3 -m venv .venv
        "$PYTHON" -m pip install --quiet --disable-pip-version-check --editable ".$extras"
        touch "$stamp"
    fi
}

mula_titan_environment "$@"
export PYTHON
