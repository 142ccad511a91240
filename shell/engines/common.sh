# Sourced by the scripts of this folder, which start examples/engines/train.py by
# an engine.
#
# Environment variables:
#   KERAS_TP_INSTALL   0: install nothing, and skip an engine that is not there.
#                      By default Debian's packages are installed, as root.
#   PYTHON             a Python that has keras_tp, the backends and, for some
#                      engines, a package. By default one is made in a virtual
#                      environment of this repository.

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PATH=$PATH:/usr/sbin

# need COMMANDS PACKAGES: installs the packages if a command is not there.
need() {
    local command missing=
    for command in $1; do
        command -v "$command" >/dev/null || missing=$command
    done
    [ -n "$missing" ] || return 0
    if [ "${KERAS_TP_INSTALL:-1}" = 0 ]; then
        echo "skipped: $missing (Debian: $2) is not installed"
        exit 0
    fi
    # Packages do not start their daemons then.
    local policy=/usr/sbin/policy-rc.d own=0
    if [ ! -e $policy ]; then
        own=1
        printf '#!/bin/sh\nexit 101\n' >$policy
        chmod +x $policy
    fi
    local code=0
    # Several names of packages.
    # shellcheck disable=SC2086
    { apt-get update -qq &&
        DEBIAN_FRONTEND=noninteractive apt-get install -qq \
            --no-install-recommends $2 >/dev/null; } || code=$?
    [ $own = 0 ] || rm $policy
    return $code
}

# need_python [MODULE PACKAGE]: sets PYTHON to one that has the module.
need_python() {
    local module=${1:-keras}
    if [ -z "${PYTHON:-}" ] && [ "${KERAS_TP_INSTALL:-1}" != 0 ]; then
        source shell/environment.sh
        make_environment .venv-engines jax,tensorflow,torch,test
        [ $# = 0 ] ||
            "$PYTHON" -m pip install --quiet --disable-pip-version-check "$2"
    fi
    PYTHON=${PYTHON:-python3}
    if ! "$PYTHON" -c "
import importlib.util, sys
sys.exit(importlib.util.find_spec('$module') is None)"; then
        echo "skipped: $PYTHON does not have $module"
        exit 0
    fi
}
