# Sourced by demo.sh and test.sh: makes a virtual environment in this
# repository and installs keras_tp with exact versions.
#
#   make_environment FOLDER EXTRAS     e.g.  make_environment .venv-demo jax,hub
#
# Afterwards $PYTHON is the environment's Python, and the current folder the
# repository. A second call with nothing changed installs nothing.

make_environment() {
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
    local folder=$1 extras=$2 base=${PYTHON_BASE:-python3}
    if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "Python 3.11 or newer is needed; $("$base" --version 2>&1) is" \
            "what '$base' starts. Set PYTHON_BASE to another one." >&2
        return 1
    fi
    PYTHON=$PWD/$folder/bin/python
    local wanted
    wanted=$(
        {
            echo "$extras $PWD"
            "$base" --version
            cat constraints.txt setup.py
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
    "$PYTHON" -m pip install --quiet --disable-pip-version-check \
        --constraint constraints.txt --editable ".[$extras]"
    echo "$wanted" >"$folder/installed"
}
