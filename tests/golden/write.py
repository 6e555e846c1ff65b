"""Write golden files anew: `PYTHONPATH=.:tests python tests/golden/write.py GROUP …`.

The commit that does it says why what is read, computed or decided is another now.
"""

import json
import sys
import tempfile
from contextlib import chdir
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent
GROUPS = ("tables", "losses", "decisions", "runs", "logs")


def values_of(group):
    """What the code of today gives, as JSON holds it."""
    module = import_module(f"golden.{group}")
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        return json.loads(json.dumps(module.values()))


def golden(group):
    """What was written."""
    return json.loads((HERE / f"{group}.json").read_text())


def main(groups):
    for group in groups:
        made = values_of(group)
        lines = [f"{json.dumps(name)}: {json.dumps(each)}" for name, each in made.items()]
        (HERE / f"{group}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(f"{group}: {len(lines)}")


if __name__ == "__main__":
    main(sys.argv[1:] or GROUPS)
