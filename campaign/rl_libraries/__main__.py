"""`python -m campaign.rl_libraries`: install d3rlpy, Minari and supersuit in a virtual environment
that is removed again, and try each with the environments."""

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

from campaign import ROOT

HERE = Path(__file__).parent


def main():
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "venv")
        venv.create(place, with_pip=True)
        python = place / "bin/python"
        packages = next(place.glob("lib/python*/site-packages"))
        # torch and the rest come from where this runs
        (packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
        install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--requirement"]
        subprocess.run([*install, HERE / "requirements.txt"], check=True)
        wrong = 0
        for trial in sorted((HERE / "trials").glob("try_*.py")):
            environment = os.environ | {
                "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
                "MINARI_DATASETS_PATH": str(Path(folder, "datasets")),
                "PYTHONWARNINGS": "ignore",
            }
            done = subprocess.run(
                [python, trial], cwd=folder, env=environment, capture_output=True, text=True
            )
            last = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1:]
            print(
                f"{trial.stem.removeprefix('try_')}: {'fine' if done.returncode == 0 else 'wrong'}",
                *last,
            )
            wrong += done.returncode != 0
    return wrong


if __name__ == "__main__":
    sys.exit(main())
