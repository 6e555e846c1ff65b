"""Measuring and recording in several processes of Ray, on this machine or a cluster."""

import os

# Ray reads these when it is imported: no report of its use to its makers, and no paragraph of its
# own on stdout about a worker that died
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")
