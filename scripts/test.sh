#!/usr/bin/env bash
# Installs fairseq_node with what its tests need, and runs them.
#
#   bash scripts/test.sh [OPTIONS of pytest, such as -k solver]
#
# One process per core runs them; -n 0 is none beside pytest's own, as --pdb and -s want it.
#
# Environment variables: those of scripts/install.sh, and OMP_NUM_THREADS.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$(bash scripts/install.sh test)
source "$venv/bin/activate" # the tests run fairseq's commands
# The tests' models are so small that threads cost more than they bring.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec python -m pytest -n auto --dist worksteal "$@"
