#!/usr/bin/env bash
# Runs tests with other versions of Python, Keras and the frameworks: a lane for
# each. A lane installs the wheel in an environment of its own, in a temporary
# folder that is removed afterwards, and prints its row of docs/lanes.md:
#
#   bash shell/lanes.sh                         # all lanes, in turn
#   bash shell/lanes.sh list                    # their names
#   bash shell/lanes.sh jax-0.10.0-keras3.15.0-py3.11
#   bash shell/lanes.sh 'torch-*' 'jax-*-py3.13'
#
# A lane runs the suite of keras_tp.testing with the installed wheel, outside of
# the checkout, and then a few tests in the checkout. It takes python3.12 from
# the PATH, or from a list: KERAS_TP_PYTHONS="/a/python /b/python". The exit code
# is 1 if a lane fails. Logs are in build/lanes. torch may bring 6 GB of CUDA
# libraries: PIP_NO_CACHE_DIR=1 keeps them out of pip's cache.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Python, Keras, backend, and the framework's exact version. The other packages
# have the versions of constraints.txt.
LANES='
3.11 3.15.0 jax 0.7.0
3.11 3.15.0 jax 0.10.0
3.11 3.15.1 jax 0.10.2
3.12 3.15.0 jax 0.10.2
3.12 3.15.1 jax 0.12.0.1
3.13 3.15.1 jax 0.12.0.1
3.11 3.15.0 tensorflow 2.20.0
3.11 3.15.1 tensorflow 2.21.0
3.12 3.15.1 tensorflow 2.21.0
3.13 3.15.1 tensorflow 2.21.0
3.11 3.15.0 torch 2.13.0
3.11 3.15.1 torch 2.13.0
3.11 3.15.1 torch 2.14.1
3.12 3.15.1 torch 2.15.0
3.13 3.15.1 torch 2.15.0
3.11 3.15.1 torch_xla 2.9.0
'

# Tests of the checkout, beside the suite: the attributes that are replaced and
# the functions of a backend, and what needs several devices.
INTERFACE=(keras_tp/backend/{hooks,interface}_test.py)
DEVICES=(keras_tp/distribution/{distribution_lib,verification}_test.py)
JAX=(keras_tp/backend/jax/{hlo_collectives,programs,schedule,storage}_test.py)
TORCH=(
    keras_tp/backend/torch/{compiling,fully_sharded,gradient_sums}_test.py
    keras_tp/backend/torch/{overlap,sequence_parallel}_test.py
    integration_tests/{collectives,gradients,torch_ops,zero}_test.py
)

# find_python VERSION: prints the interpreter.
find_python() {
    local python
    for python in ${KERAS_TP_PYTHONS:-} "python$1"; do
        # A shim may be on the PATH and start nothing.
        if [ "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' \
            2>/dev/null)" = "$1" ]; then
            echo "$python"
            return
        fi
    done
    echo "No python$1 on the PATH, nor in KERAS_TP_PYTHONS." >&2
    return 1
}

# install PYTHON KERAS BACKEND VERSION: makes $folder/environment.
install() {
    local base=$1 keras=$2 backend=$3 version=$4
    "$base" -m venv "$folder/environment"
    local pins=("keras==$keras")
    case $backend in
    jax) pins+=("jax==$version" "jaxlib==$version") ;;
    tensorflow) pins+=("tensorflow==$version" "tensorboard~=${version%.*}.0") ;;
    torch) pins+=("torch==$version") ;;
    torch_xla) pins+=("torch==$version" "torch_xla==$version") ;;
    esac
    grep -v -E "^($(printf '%s\n' "${pins[@]%%[=~]=*}" | paste -sd '|'))==" \
        constraints.txt >"$folder/constraints.txt"
    printf '%s\n' "${pins[@]}" >>"$folder/constraints.txt"
    if [ ! -d "$work/wheel" ]; then
        # Built in a copy: build/ may have files of an older build.
        mkdir -p "$work/source"
        cp -r keras_tp setup.py pyproject.toml README.md LICENSE "$work/source"
        "$folder/environment/bin/python" -m pip wheel --quiet --no-deps \
            --wheel-dir "$work/wheel" "$work/source"
    fi
    # Without the extra: a lane also tries versions that setup.py does not allow
    # yet. Python compiles what is imported, a small part of a framework.
    "$folder/environment/bin/python" -m pip install --quiet --no-compile \
        --constraint "$folder/constraints.txt" pytest "$work"/wheel/*.whl \
        "${pins[@]}"
}

# run_tests BACKEND: the suite outside of the checkout, then tests inside.
run_tests() {
    local python=$folder/environment/bin/python backend=$1
    export KERAS_BACKEND=${backend/_xla/} KERAS_TP_BACKEND=$backend
    export TF_CPP_MIN_LOG_LEVEL=3 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    if [ "$backend" = jax ]; then
        # As in test.sh, but for its XLA flag, which jaxlib 0.12 does not know.
        export JAX_DISABLE_MOST_OPTIMIZATIONS=1
    fi
    export PJRT_DEVICE=CPU CPU_NUM_DEVICES=4
    (
        mkdir "$folder/elsewhere"
        cd "$folder/elsewhere"
        "$python" -m keras_tp.testing --backend "$backend" --devices 2
    ) 2>&1 | tee "$folder/suite"
    case $backend in
    torch)
        tests -m pytest "${INTERFACE[@]}"
        export KERAS_TP_RANK_FOLDER=$folder/ranks
        tests -m keras_tp.launch --devices 2 integration_tests/torch_ranks.py \
            -x "${DEVICES[@]}" "${TORCH[@]}"
        ;;
    torch_xla) tests -m pytest "${INTERFACE[@]}" ;;
    jax) tests -m pytest "${INTERFACE[@]}" "${DEVICES[@]}" "${JAX[@]}" ;;
    tensorflow) tests -m pytest "${INTERFACE[@]}" "${DEVICES[@]}" ;;
    esac
}

tests() {
    # pyproject.toml has -q, and twice leaves out the last line.
    "$folder/environment/bin/python" "$@" -p no:warnings 2>&1 |
        tee -a "$folder/more"
}

# counts FILE: "12 passed, 1 skipped", the sums of pytest's last lines.
counts() {
    grep -E '^(=+ )?[0-9]+ (passed|failed|skipped|error).* in [0-9.]+s' "$1" \
        2>/dev/null | grep -oE '[0-9]+ (passed|failed|skipped|error)' |
        awk '{ sum[$2] += $1 }
            END {
                split("passed skipped failed error", names)
                for (i = 1; i <= 4; i++)
                    if (names[i] in sum) {
                        printf "%s%d %s", by, sum[names[i]], names[i]
                        by = ", "
                    }
            }'
}

# lane NAME PYTHON KERAS BACKEND VERSION: prints its row.
lane() {
    local name=$1 python code result start=$SECONDS
    shift
    folder=$work/$name
    mkdir "$folder"
    python=$(find_python "$1") || python=
    (
        set -e
        [ -n "$python" ]
        install "$python" "$2" "$3" "$4"
        run_tests "$3"
    ) >"build/lanes/$name.log" 2>&1
    code=$?
    result=passed
    [ $code = 0 ] || result="failed: build/lanes/$name.log"
    echo "| $1 | $2 | $3 $4 | $(counts "$folder/suite") |" \
        "$(counts "$folder/more") | \`bash shell/lanes.sh $name\` |" \
        "$result, $((SECONDS - start)) s |"
    rm -rf "$folder"
    return $code
}

names=("$@")
[ $# -gt 0 ] || names=('*')
if [ "${names[0]}" != list ]; then
    echo "| Python | Keras | framework | suite | more tests | command | result |"
    echo "|---|---|---|---|---|---|---|"
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p build/lanes
ran=0 failed=0
while read -r python keras backend version; do
    [ -n "$python" ] || continue
    name=$backend-$version-keras$keras-py$python
    for pattern in "${names[@]}"; do
        if [ "$pattern" = list ]; then
            ran=1
            echo "$name"
        elif [[ $name == $pattern ]]; then
            ran=1
            # With `||` behind it, `set -e` would have no effect inside of it.
            set +e
            lane "$name" "$python" "$keras" "$backend" "$version"
            [ $? = 0 ] || failed=1
            set -e
            break
        fi
    done
done <<<"$LANES"
if [ $ran = 0 ]; then
    echo "No lane has this name. Run \`bash shell/lanes.sh list\`." \
        "Received: ${names[*]}" >&2
    exit 2
fi
exit $failed
