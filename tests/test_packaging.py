"""The package is whole, and its scripts say what is missing. Nothing here needs the network."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from setuptools import find_packages

CHECKOUT = Path(__file__).resolve().parents[1]
SHELL_SCRIPTS = [CHECKOUT / ".ci" / "run", *sorted(CHECKOUT.glob("scripts/**/*.sh"))]
SUPPORTED = "3.11"


def setup_py(*arguments):
    command = [sys.executable, "setup.py", *arguments]
    run = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    return run.stdout.split()


def test_every_folder_with_code_is_packaged():
    with_code = {file.parent for file in CHECKOUT.glob("fairseq_node/**/*.py")}
    names = {".".join(folder.relative_to(CHECKOUT).parts) for folder in with_code}
    assert names == set(find_packages(str(CHECKOUT), include=["fairseq_node", "fairseq_node.*"]))


def test_version_is_told_once():
    import fairseq_node

    assert setup_py("--version")[-1:] == [fairseq_node.__version__]


def test_shell_scripts_parse():
    for script in SHELL_SCRIPTS:
        subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.fixture
def checkout(tmp_path):
    """A checkout with what install.sh reads, whose .venv is nobody's. A space tests the quoting."""
    folder = tmp_path / "check out"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(CHECKOUT / "scripts" / "install.sh", folder / "scripts")
    shutil.copy(CHECKOUT / "setup.py", folder)
    return folder


@pytest.fixture
def install(checkout):
    """Runs install.sh where pip finds nothing; returns its exit status and what it said."""

    def run(*extras, **environment):
        inherited = {name: os.environ[name] for name in os.environ if name not in ("CC", "CXX")}
        done = subprocess.run(
            ["bash", str(checkout / "scripts" / "install.sh"), *extras],
            env={**inherited, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout

    return run


@pytest.fixture
def python(tmp_path):
    """Makes an interpreter that tells of itself what the test wants install.sh to hear."""
    include = tmp_path / "include"
    include.mkdir()
    (include / "Python.h").touch()

    def make(version=SUPPORTED, has_venv="yes", headers=include, cc="true", cxx="true"):
        path = tmp_path / "python"
        facts = version, path, has_venv, headers, cc, cxx
        path.write_text("#!/bin/sh\nprintf '%s\\n' " + " ".join(f"'{fact}'" for fact in facts))
        path.chmod(0o755)
        return str(path)

    return make


@pytest.mark.parametrize("version", ["2.7", "3.8", "3.13", "3.100"])
def test_unsupported_python(install, python, checkout, version):
    status, said = install(PYTHON=python(version))
    assert status == 1
    assert re.search(rf"is Python {re.escape(version)}, but fairseq needs 3\.9 to 3\.12", said)
    assert not list(checkout.glob(".venv*"))


def test_python_that_is_not_there(install):
    status, said = install(PYTHON="no-such-python")
    assert status == 1
    assert "PYTHON=no-such-python does not run: give the name or path of a Python 3.9 to 3.12" in said


def test_no_python_on_the_path(install, tmp_path):
    commands = tmp_path / "bin"
    commands.mkdir()
    for command in "bash", "dirname", "sed", "tail":
        (commands / command).symlink_to(shutil.which(command))
    status, said = install(PATH=str(commands), PYTHON="")
    assert status == 1
    assert "no Python 3.9 to 3.12 is on the PATH: install one" in said


@pytest.mark.parametrize("variable", ["CC", "CXX"])
def test_missing_compiler(install, python, variable):
    status, said = install(PYTHON=python(), **{variable: "no-such-compiler -O2"})
    assert status == 1
    assert re.search(r"no-such-compiler, .* is missing: install a C and C\+\+ compiler", said)


def test_compiler_that_fails(install, python):
    status, said = install(PYTHON=python(cxx="false"))
    assert status == 1
    assert "false, with which pip builds fairseq, does not compile C++" in said


def test_missing_headers(install, python, tmp_path):
    status, said = install(PYTHON=python(headers=tmp_path / "nowhere"))
    assert status == 1
    assert re.search(r"nowhere/Python\.h, .* is missing: install the headers of Python 3\.11", said)


def test_missing_venv_module(install, python):
    status, said = install(PYTHON=python(has_venv="no"))
    assert status == 1
    assert "Python 3.11 has no venv module: install it" in said


def test_pip_fails_and_nothing_is_taken_for_done(install, checkout):
    for attempt in range(2):
        status, said = install(PYTHON=sys.executable, CC="true", CXX="true")
        assert status == 1
        assert "pip could not install this (above): check the network" in said
        assert ("making" in said) == (attempt == 0)
    assert not (checkout / ".venv" / "installed").exists()


def test_another_version_gets_an_environment_of_its_own(install, python, checkout):
    first = checkout / ".venv" / "bin"
    first.mkdir(parents=True)
    (first / "activate").write_text(f"VIRTUAL_ENV='{checkout}/.venv'")
    (first / "python").symlink_to(sys.executable)
    other = "3.9" if sys.version_info[:2] != (3, 9) else "3.10"
    said = install(PYTHON=python(other))[1]
    assert f"making {checkout}/.venv-{other} with Python {other}" in said


def test_moved_environment(install, checkout):
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "activate").write_text("VIRTUAL_ENV='/elsewhere/.venv'")
    (checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    status, said = install()
    assert status == 1
    assert "was made in another place, and its commands still lead there: remove it" in said


@pytest.mark.skipif(
    not (Path(sys.prefix) / "installed").exists() or Path(sys.prefix).parent != CHECKOUT,
    reason="these tests do not run in the environment that scripts/test.sh makes",
)
def test_second_call_installs_nothing():
    run = subprocess.run(
        ["bash", str(CHECKOUT / "scripts" / "install.sh"), "test"],
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == f"{sys.prefix}\n"
    assert "is up to date" in run.stderr
