# Sourced by the scripts beside it: goes to the repository's root and makes the virtual
# environment they run in. PYTHON names the interpreter to make it with, PALM_JAX_VENV
# another folder for it than .venv.

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd -- "$root"
venv=${PALM_JAX_VENV:-$root/.venv}

say() { printf '== %s\n' "$*"; }
fail() {
  printf 'error: %s\n' "$*" >&2
  exit 3 # the environment cannot do it
}

show_help_if_asked() { # the comment that opens the script
  case ${1-} in -h | --help)
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
  esac
}

# What runs, not what is on the PATH: a version manager's shim may stand for nothing, and
# some systems ship Python without the parts that make environments.
runs() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
  local candidate
  if [ -n "${PYTHON-}" ]; then
    runs "$PYTHON" || fail "PYTHON=$PYTHON does not run, is older than 3.11, or lacks venv and ensurepip"
    python=$PYTHON
    return
  fi
  for candidate in python3.13 python3.12 python3.11 python3; do
    if runs "$candidate"; then
      python=$candidate
      return
    fi
  done
  fail "no Python from 3.11 on that runs and can make virtual environments was found;" \
    "install one (on Debian and Ubuntu with python3-venv), or name it with PYTHON=..."
}

# All that an installed environment depends on. A folder that moved is another one, since
# the environment holds its path.
wanted_stamp() {
  "$python" - "$root" <<'PY'
import hashlib
import pathlib
import sys

root = pathlib.Path(sys.argv[1])
files = [(root / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
facts = [sys.version, sys.base_prefix, str(root), *(hashlib.sha256(f).hexdigest() for f in files)]
print(hashlib.sha256("\n".join(facts).encode()).hexdigest())
PY
}

# prepare_environment [EXTRA,...]: afterwards $venv/bin holds palm-jax, with `dev` the tools for
# development, with `tpu` the compiler for TPUs.
prepare_environment() {
  local extra=${1-} stamp=$venv/palm_jax_stamp wanted installed=
  find_python
  wanted=$(wanted_stamp)
  if [ -e "$stamp" ] && "$venv/bin/python" -c '' >/dev/null 2>&1; then
    installed=$(cat "$stamp")
  fi
  case $installed in
    "$wanted "*)
      local have=",${installed#"$wanted "}," all=yes name
      for name in ${extra//,/ }; do
        [[ $have == *",$name,"* ]] || all=
      done
      [ -z "$all" ] || return 0
      ;;
    *) make_environment "$stamp" ;;
  esac
  say "Installing palm-jax${extra:+ with $extra} (the first time, this takes minutes)"
  # Until it is whole, the stamp fits nothing, so that an interrupted installation is redone.
  echo incomplete >"$stamp"
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check \
    -c constraints.txt -e ".${extra:+[$extra]}" ||
    fail "the installation into $venv failed, as pip says above; run this again once it can succeed"
  echo "$wanted $extra" >"$stamp"
}

make_environment() {
  local stamp=$1
  if [ -e "$stamp" ]; then
    say "Removing $venv: it was made by another Python, for other versions, or not finished"
    rm -rf -- "$venv"
  elif [ -e "$venv" ] && [ -n "$(ls -A -- "$venv")" ]; then
    fail "$venv was not made by these scripts; move it away, or set PALM_JAX_VENV to another folder"
  fi
  say "Making $venv with $("$python" -c 'import platform; print("Python", platform.python_version())')"
  mkdir -p -- "$venv"
  echo incomplete >"$stamp"
  "$python" -m venv "$venv" || fail "$python could not make a virtual environment in $venv"
}
