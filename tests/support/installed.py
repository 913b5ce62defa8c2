"""The package as installed from a wheel, away from the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tests.support import ROOT

SOURCES = ("pipeline", "recipes", "accelerate_configs")
SOURCES += ("pyproject.toml", "setup.py", "README.md", "LICENSE")
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])('out'))"


def environment() -> dict[str, str]:
    """The variables of this process without the import path, which leads to the checkout."""
    return {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}


def said_by(*command: object, cwd: Path) -> str:
    """What a command prints that must succeed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


def built(kind: str, folder: Path) -> Path:
    """Build an `sdist` or a `wheel` in `folder` with the setuptools of this environment."""
    for name in SOURCES:  # a copy, since a build leaves files in its folder
        if (ROOT / name).is_dir():
            unwanted = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
        else:
            shutil.copy(ROOT / name, folder)
    (folder / "out").mkdir()
    said = said_by(sys.executable, "-c", BUILD, f"build_{kind}", cwd=folder)
    return folder / "out" / said.split()[-1]


def installed_wheel(folder: Path) -> Path:
    """The console command of a new environment with the wheel and this environment's libraries."""
    (folder / "source").mkdir()
    wheel, home = built("wheel", folder / "source"), folder / "environment"
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
    said_by(*pip, "--no-index", "--no-deps", wheel, cwd=folder)
    # Python searches a folder in a .pth file for libraries, but reads no .pth file in the folder.
    # One of them may lead to the checkout.
    (site,) = home.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return checked(home)


def checked(home: Path) -> Path:
    """The console command of an environment, which must not find the checkout."""
    code = "import pipeline; print(pipeline.__file__)"
    assert said_by(home / "bin" / "python", "-c", code, cwd=home).startswith(f"{home}/lib")
    command = home / "bin" / "three-domain-grpo"
    assert said_by(command, "--help", cwd=home).startswith("usage: three-domain-grpo COMMAND")
    return command
