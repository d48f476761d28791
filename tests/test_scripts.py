"""The set-up commands and what they install."""

import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ["scripts/setup", "scripts/demo", "scripts/test", ".ci/run"]

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    tomllib = None


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_executable_and_parse(script):
    path = ROOT / script
    assert path.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True).returncode == 0


def _pins() -> dict[str, str]:
    lines = (ROOT / "scripts/requirements.txt").read_text().splitlines()
    pins = [
        re.match(r"([\w-]+)(?:\[\w+\])?==(\S+?)(?:;|$)", line) for line in lines if line and line[0] != "#"
    ]
    assert all(pins), "every requirement is pinned"
    return {pin[1]: pin[2] for pin in pins}


@pytest.mark.skipif(tomllib is None, reason="tomllib came with Python 3.11")
def test_every_dependency_but_torch_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["test"]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in wanted}
    assert names - {"torch"} == set(_pins())


def test_setup_pins_torch():
    assert re.search(r"^torch=torch==\d+\.\d+\.\d+$", (ROOT / "scripts/setup").read_text(), re.MULTILINE)


def test_the_compiler_uses_the_libraries_of_cuda_13():
    """The plain DSL package brings those of CUDA 12, whose assembler makes other code."""
    assert (
        metadata.version("nvidia-cutlass-dsl-libs-cu13") == metadata.version("nvidia-cutlass-dsl") == "4.8.1"
    )


def test_setup_is_quick_once_done(tmp_path):
    """With its fingerprint in place, setup neither looks for a Python nor installs."""
    for folder in ("scripts", ".venv"):
        (tmp_path / folder).mkdir()
    for name in ("scripts/setup", "scripts/requirements.txt", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    command = "cat scripts/setup scripts/requirements.txt pyproject.toml | cksum"
    fingerprint = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, check=True
    ).stdout
    (tmp_path / ".venv/.installed").write_bytes(fingerprint)
    (tmp_path / "scripts/setup").chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(tmp_path / "no-python")}
    done = subprocess.run(["scripts/setup"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (tmp_path / "pyproject.toml").write_text("changed")
    done = subprocess.run(["scripts/setup"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and "no-python" in done.stderr


def test_an_old_python_is_refused(tmp_path):
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup", "scripts/requirements.txt", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "scripts/setup").chmod(0o755)
    old = tmp_path / "python3.8"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.8.0" && exit 0\nexit 1\n')
    old.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(old)}
    done = subprocess.run(["scripts/setup"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "is Python 3.8.0, want Python 3.10 or later: set PYTHON" in done.stderr
    assert not (tmp_path / ".venv").exists()
