#!/usr/bin/env bash
# Installs fairseq_node, and the build of fairseq that suits this Python, into a virtual environment.
#
#   bash scripts/install.sh [EXTRA...]
#
# EXTRA  of setup.py: data, plots, test
#
# Prints the path of the environment on standard output, and what it does on standard error. That is
# .venv in the checkout; if PYTHON names another version than .venv has, .venv-3.10 or the like.
# It may be stopped at any time: a second call goes on, and takes a moment when nothing is left to do.
# Environment variables:
#   PYTHON=python3.10           the Python to use, 3.9 to 3.12 (default: that of .venv, or python3)
#   TORCH_SPEC='torch==2.13.0'  the torch to install, as pip is told it; options may follow (default: torch)
#   CC, CXX                     the compilers that build fairseq (default: those that built Python)
set -euo pipefail

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit
fi
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
torch_spec=${TORCH_SPEC:-torch}
default=''
[[ -n ${TORCH_SPEC:-} ]] || default=' (on Linux several GB, with CUDA; TORCH_SPEC asks for another)'

say() {
    echo "install: $*" >&2
}

die() {
    say "$*"
    exit 1
}

# describe PYTHON: sets version, executable, has_venv, headers, cc and cxx; fails if it does not run.
describe() {
    local facts='
import sys, sysconfig
try:
    import ensurepip, venv
    has_venv = "yes"
except ImportError:
    has_venv = "no"
print("%d.%d" % sys.version_info[:2])
for fact in sys.executable, has_venv, sysconfig.get_path("include"):
    print(fact)
for compiler in "CC", "CXX":
    print(sysconfig.get_config_var(compiler))'
    # pyenv has the name of every installed version on the PATH, but runs only those that are selected.
    facts=$("$1" -c "$facts" 2>/dev/null ||
        PYENV_VERSION=$(pyenv whence "$1" 2>/dev/null | tail -n 1) "$1" -c "$facts" 2>/dev/null) || return
    for fact in version executable has_venv headers cc cxx; do
        read -r "${fact?}"
    done <<<"$facts"
}

supported() {
    [[ $version =~ ^3\.(9|10|11|12)$ ]]
}

# choose_python: describes PYTHON, or that of .venv, or the first supported one on the PATH.
choose_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        describe "$PYTHON" || die "PYTHON=$PYTHON does not run: give the name or path of a Python 3.9 to 3.12."
        supported || die "PYTHON=$PYTHON is Python $version, but fairseq needs 3.9 to 3.12: choose one of these."
        return
    fi
    if complete "$checkout/.venv" && describe "$checkout/.venv/bin/python" && supported; then
        return
    fi
    for candidate in python3 python3.{12,11,10,9}; do
        if describe "$candidate" && supported; then
            return
        fi
    done
    die "no Python 3.9 to 3.12 is on the PATH: install one, or give its path, as in PYTHON=~/python3.11/bin/python3."
}

# complete VENV: whether it has what Python's venv module writes last.
complete() {
    [[ -e $1/bin/activate ]]
}

# choose_venv: .venv, unless it has another version of Python than the chosen one.
choose_venv() {
    local has
    venv=$checkout/.venv
    if complete "$venv"; then
        has=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
            die "$venv does not run, since the Python that it was made with is gone: remove it and call this again."
        [[ $has == "$version" ]] || venv=$venv-$version
    fi
    if complete "$venv" && ! grep -qF "$venv" "$venv/bin/activate"; then
        die "$venv was made in another place, and its commands still lead there: remove it and call this again."
    fi
}

# check_compiler: says what is missing before minutes are spent on downloads.
check_compiler() {
    local compiler
    for compiler in "${CC:-$cc}" "${CXX:-$cxx}"; do
        command -v "${compiler%% *}" >/dev/null ||
            die "${compiler%% *}, with which pip builds fairseq, is missing: install a C and C++ compiler" \
                "(Debian, Ubuntu: apt-get install g++), or name yours in CC and CXX."
    done
    [[ -e $headers/Python.h ]] ||
        die "$headers/Python.h, with which pip builds fairseq, is missing: install the headers of" \
            "Python $version (Debian, Ubuntu: apt-get install python$version-dev)."
    ${CXX:-$cxx} -I"$headers" -x c++ -fsyntax-only - <<<$'#include <Python.h>\n#include <vector>' >&2 ||
        die "${CXX:-$cxx}, with which pip builds fairseq, does not compile C++ (above): install its standard" \
            "library (Debian, Ubuntu: apt-get install g++), or name another compiler in CXX."
}

make_venv() {
    say "making $venv with Python $version"
    "$executable" -m venv "$venv" >&2 ||
        die "Python's venv module failed (above): remove $venv and call this again."
    [[ $("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') == "$version" ]] ||
        die "$venv was begun with another Python: remove it and call this again."
}

# pip_install WHAT...: into the environment.
pip_install() {
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check "$@" >&2 ||
        die "pip could not install this (above): check the network, the disk and pip's settings, then call" \
            "this again, which goes on from here."
}

# constrain: keeps the torch that was asked for, and what it was built for, through the steps that follow.
constrain() {
    local torch
    torch=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')
    # Else torchaudio, of which fairseq takes any version, has pip replace torch by the newest.
    echo "torch==$torch"
    case $torch in
    2.[12].*) echo "numpy<2" ;; # they were built for NumPy 1
    esac
    case $torch in
    2.1.*) echo "setuptools<70" ;; # its builder of extensions imports what setuptools has removed since
    esac
}

choose_python
choose_venv

# One installation at a time. The lock ends with the last process that holds it, be it a pip left behind.
exec 9>"$venv.lock"
if command -v flock >/dev/null && ! flock --nonblock 9; then
    say "waiting for another installation into $venv"
    flock 9
fi

# The stamp tells what has been installed: from which inputs, and which extras.
stamp=$venv/installed
inputs="$venv $version $torch_spec $(cat "$checkout/setup.py" "$checkout/scripts/install.sh" | cksum)"
had_inputs='' had_extras=''
if [[ -e $stamp ]]; then
    { read -r had_inputs && read -r had_extras; } <"$stamp"
fi
[[ $had_inputs == "$inputs" ]] || had_extras=''
extras=$(printf '%s\n' ${had_extras//,/ } "$@" | sed '/^$/d' | sort -u | paste -sd, -)
if [[ $had_inputs == "$inputs" && $had_extras == "$extras" ]]; then
    say "$venv is up to date (Python $version, $torch_spec, extras: ${extras:-none})"
    echo "$venv"
    exit
fi

rm -f "$stamp" # from here on what is there may be half of something
build=''
if [[ ! -e $venv/bin/fairseq-train ]]; then
    check_compiler
    build=', which builds fairseq: about five minutes'
fi
if ! complete "$venv"; then
    [[ $has_venv == yes ]] ||
        die "Python $version has no venv module: install it (Debian, Ubuntu: apt-get install python$version-venv)."
    make_venv
fi
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >&2

if [[ $version == 3.9 || $version == 3.10 ]]; then
    # fairseq 0.12.2 needs omegaconf 2.0.6, whose metadata newer pips refuse. Its source package lacks the
    # files of its extensions for torch, so that it builds only where torch is out of sight: in isolation.
    pip='pip<24.1' isolation='' builders=''
else
    # fairseq-fixed needs torch to build, and in isolation pip would fetch several GB of another one.
    pip=pip isolation=--no-build-isolation builders='cython numpy'
fi

say "installing pip and setuptools"
pip_install "$pip" setuptools wheel
say "installing $torch_spec$default"
pip_install $torch_spec
constrain >"$venv/constraints.txt"
say "installing fairseq_node${extras:+ with $extras}$build"
pip_install --constraint "$venv/constraints.txt" setuptools $builders
pip_install --constraint "$venv/constraints.txt" $isolation --editable "$checkout${extras:+[$extras]}"
errors=$("$venv/bin/python" -c 'import fairseq.data.data_utils_fast' 2>&1) ||
    die "fairseq is installed but does not import: remove $venv and call this again."$'\n'"$errors"

printf '%s\n' "$inputs" "$extras" >"$stamp.part"
mv "$stamp.part" "$stamp"
say "done: source $venv/bin/activate"
echo "$venv"
