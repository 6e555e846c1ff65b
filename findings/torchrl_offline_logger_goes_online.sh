#!/bin/bash
# One would guess: `WandbLogger(offline=True)` of TorchRL logs offline.
# It does in a process that has not used wandb yet. It only sets WANDB_MODE, which wandb reads once
# in a process, so that after any other run, an offline one too, the logger wants to go online:
# without a key it raises, and with one it uploads.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install torch==2.14.1 tensordict==0.14.3 torchrl==0.14.1 wandb==0.31.0 numpy 2>/dev/null
cd "$folder"
# no key, and nothing of the caller's
export NETRC="$folder/netrc" WANDB_CONFIG_DIR="$folder/settings" WANDB_SILENT=true
unset WANDB_API_KEY WANDB_MODE WANDB_BASE_URL
cat > run.py <<'P'
import logging
import sys
import warnings

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
import torchrl
import wandb
from torchrl.record.loggers.wandb import WandbLogger


def logs():
    try:
        logger = WandbLogger("run", offline=True, save_dir=".", log_env_packages=False)
    except wandb.errors.UsageError as error:
        return f"raises {type(error).__name__}: {error}"
    logger.experiment.finish()
    return "offline" if logger.experiment.offline else "online"


other = sys.argv[1] == "after"
if other:
    wandb.init(dir=".", mode="offline").finish()
result = logs()
print("torchrl", torchrl.__version__, "wandb", wandb.__version__, "after another run:", other, "->", result)
sys.exit(int(not (result.startswith("raises UsageError: No API key") if other else result == "offline")))
P
"$folder/venv/bin/python" run.py alone
"$folder/venv/bin/python" run.py after
