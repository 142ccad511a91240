# Sourced by demo.sh and test.sh: makes a virtual environment in this
# repository and installs keras_tp with exact versions.
#
#   make_environment FOLDER EXTRAS     e.g.  make_environment .venv-demo jax,hub
#   make_environment FOLDER EXTRAS PACKAGES VERSION...
#
# The second form installs other packages too, and takes the versions, such as
# torch==2.9.0, in place of those in constraints.txt. `install_packages` installs more.
#
# Afterwards $PYTHON is the environment's Python, and the current folder the
# repository. A second call with nothing changed installs nothing.

make_environment() {
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
    local folder=$1 extras=$2 packages=${3:-} base=${PYTHON_BASE:-python3}
    shift $(($# < 3 ? $# : 3))
    VERSIONS=$PWD/constraints.txt
    if [ $# -gt 0 ]; then
        mkdir -p build
        VERSIONS=$PWD/build/$folder.txt
        grep -v -E "^($(printf '%s\n' "${@%%=*}" | paste -sd '|'))==" \
            constraints.txt >"$VERSIONS"
        printf '%s\n' "$@" >>"$VERSIONS"
    fi
    if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "Python 3.11 or newer is needed; $("$base" --version 2>&1) is" \
            "what '$base' starts. Set PYTHON_BASE to another one." >&2
        return 1
    fi
    PYTHON=$PWD/$folder/bin/python
    local wanted
    wanted=$(
        {
            echo "$extras $packages $PWD"
            "$base" --version
            cat "$VERSIONS" setup.py
        } | "$base" -c '
import hashlib, sys
print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
    )
    if [ -x "$PYTHON" ] && [ "$(cat "$folder/installed" 2>/dev/null)" = "$wanted" ]; then
        return 0
    fi
    # The stamp is written last: an interrupted installation is done anew.
    rm -rf "$folder"
    "$base" -m venv "$folder"
    # shellcheck disable=SC2086
    install_packages --editable ".[$extras]" $packages
    echo "$wanted" >"$folder/installed"
}

install_packages() {
    "$PYTHON" -m pip install --quiet --disable-pip-version-check \
        --constraint "$VERSIONS" "$@"
}
