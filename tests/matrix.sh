#!/usr/bin/env bash
# The test suite on other Pythons and other releases of torch, each in a virtual environment of its own.
#
#   tests/matrix.sh "python3.10 python3.12" "2.4.1 2.13.0 newest"
#
# Prints one line for each combination. A Python that is not on this machine, or a torch that has no build for it,
# is reported as skipped with the reason; the script fails if any suite failed, or if every one was skipped.
# MATRIX_SELECT narrows the suite (arguments for pytest).
set -uo pipefail
cd "$(dirname "$0")/.."

pythons=${1:?interpreters, space separated}
torches=${2:?torch releases, space separated}
passed=0 failed=0 skipped=0 summary=()

note() { summary+=("$(printf '%-12s torch %-8s %s' "$1" "$2" "$3")"); }

prepare() { # python, torch, folder
    local folder=$3 constraint
    "$1" -m venv "$folder" && "$folder/bin/python" -m pip install --quiet --upgrade pip || return 1
    constraint="torch==$2"
    [ "$2" = newest ] && constraint="torch"
    # Not constraints.txt: each torch release takes the newest frameworks that still go with it.
    # transformers 5 switches itself off below torch 2.6, without saying so to pip.
    local transformers=transformers torchao=torchao
    # torchao 0.12 and later do not import under torch 2.4, and pip is not told either.
    case $2 in 2.4* | 2.5*) transformers='transformers<5' torchao='torchao<0.12' ;; esac
    "$folder/bin/python" -m pip install --quiet "$constraint" "$transformers" "$torchao" -e . --group test
}

for python in $pythons; do
    for torch in $torches; do
        if ! "$python" -c 'import venv' 2>/dev/null; then
            note "$python" "$torch" "skipped: $python is not on this machine"
            skipped=$((skipped + 1))
            continue
        fi
        folder=.matrix/$(basename "$python")-torch-$torch
        mkdir -p .matrix
        if ! prepare "$python" "$torch" "$folder" >"$folder.log" 2>&1; then
            if grep -q 'No matching distribution found for torch' "$folder.log"; then
                note "$python" "$torch" "skipped: that release has no build for this Python"
                skipped=$((skipped + 1))
            else
                note "$python" "$torch" "FAILED to install, see $folder.log"
                failed=$((failed + 1))
            fi
            continue
        fi
        # shellcheck disable=SC2086 # MATRIX_SELECT is several words on purpose
        if "$folder/bin/python" -m pytest -n auto --dist loadfile -q ${MATRIX_SELECT:-} 2>&1 | tee -a "$folder.log" | tail -n 3; then
            note "$python" "$torch" "passed: $(tail -n 1 "$folder.log")"
            passed=$((passed + 1))
        else
            note "$python" "$torch" "FAILED, see $folder.log"
            failed=$((failed + 1))
        fi
    done
done

printf '%s\n' "" "${summary[@]}"
printf 'matrix: %d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
