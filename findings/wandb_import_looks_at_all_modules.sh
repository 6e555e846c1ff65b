#!/bin/bash
# One would guess: what an import costs does not hang on which other libraries are loaded already, so it
# is the same at the top of a program and in the middle of it, where `wandb.init` does it.
# It is: below Python 3.13 importing W&B's API goes about a hundred times through every module there is.
# pydantic (use_attribute_docstrings) looks for the source of each of W&B's models by asking inspect for
# the module of every frame on the stack; a model like Edge[T] has no source, so all frames are asked,
# and those of import itself are in no file, for which inspect goes through sys.modules each time. The
# more is loaded, the slower it is.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install wandb==0.31.0 pydantic==2.14.4 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import importlib.metadata
import platform
import sys
import time
import types


class Bystander(types.ModuleType):
    """A module that counts who wants to know its file."""

    looks = 0

    def __getattribute__(self, name):
        if name == "__file__":
            Bystander.looks += 1
        return super().__getattribute__(name)


sys.modules["bystander"] = Bystander("bystander")
sys.modules["bystander"].__file__ = "bystander.py"
for number in range(int(sys.argv[1])):
    other = types.ModuleType(f"other{number}")
    other.__file__ = f"{other.__name__}.py"
    sys.modules[other.__name__] = other
import wandb

began = time.process_time()
import wandb.apis.public

seconds = time.process_time() - began
if not int(sys.argv[1]):
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("wandb", "pydantic")]
    print(", ".join(["Python " + platform.python_version(), *versions]))
print(f"{sys.argv[1]} other modules: a bystander is looked at {Bystander.looks} times, {seconds:.2f} s of CPU")
sys.exit(not (Bystander.looks == 0 if sys.version_info >= (3, 13) else Bystander.looks > 50))
P
"$folder/venv/bin/python" run.py 0
"$folder/venv/bin/python" run.py 20000
