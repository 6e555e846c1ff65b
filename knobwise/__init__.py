"""knobwise: learn which setting of a large model's knobs to use for each input under a latency
budget.

`import knobwise` is light, without NumPy; it makes `gymnasium.make("knobwise/ConfigBandit-v0")`
and, for selectors of demonstrations, `gymnasium.make("knobwise/DemonstrationBandit-v0", table=…)`
known and nothing more. `knobwise.read` (`knobwise.reading`) reads a profile; `knobwise.fit`
(`knobwise.api`) trains a policy, and `knobwise.load` (`knobwise.loading`) loads one;
`knobwise.wrap` puts it in front of a callable; `knobwise.compare_policies` compares it with others.
The parts, in the order in which data passes through them: `knobwise.profiling` measures,
`knobwise.envs` reads and replays, `knobwise.agents` decides and learns, `knobwise.losses` holds
what is minimised, `knobwise.experiments` launches, tracks and reports.
"""

from typing import TYPE_CHECKING

from knobwise import registration
from knobwise._version import __version__
from knobwise.common.lazy import lazy

if TYPE_CHECKING:
    from knobwise.api import fit as fit
    from knobwise.experiments.report.policies import compare_policies as compare_policies
    from knobwise.loading import load as load
    from knobwise.reading import read as read
    from knobwise.serving.knob_policy import KnobPolicy as KnobPolicy
    from knobwise.serving.wrapper import wrap as wrap

registration.register()

# policies that are loaded and served need no torch, and tables nothing of what learns
MODULES = {"KnobPolicy": "serving.knob_policy", "load": "loading", "wrap": "serving.wrapper"}
MODULES |= {"read": "reading", "fit": "api"}
MODULES["compare_policies"] = "experiments.report.policies"
__getattr__ = lazy(__name__, MODULES)
__all__ = ["__version__", *MODULES]
