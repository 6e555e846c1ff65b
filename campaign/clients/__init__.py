"""Real clients and gateways in front of `knobwise serve`, and real servers behind it, see
docs/routing.md."""

import sys

from campaign import ROOT

# what starts a server and asks it in tests
sys.path.insert(0, str(ROOT / "tests/serving/proxy"))
