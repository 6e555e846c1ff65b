"""knobwise: learn which setting of a large model's knobs to use for each input under a latency
budget.

`import knobwise` is light; it makes `gymnasium.make("knobwise/ConfigBandit-v0")` and, for selectors
of demonstrations, `gymnasium.make("knobwise/DemonstrationBandit-v0", table=…)` known and nothing
more. `knobwise.read` (`knobwise.reading`) reads a profile; `knobwise.fit` and `knobwise.load`
(`knobwise.api`) train a policy and load one; `knobwise.wrap` puts it in front of a callable;
`knobwise.compare_policies` compares it with others. The parts, in the order in which data passes
through them: `knobwise.profiling` measures, `knobwise.envs` reads and replays, `knobwise.agents`
decides and learns, `knobwise.losses` holds what is minimised, `knobwise.experiments` launches,
tracks and reports.
"""

from typing import TYPE_CHECKING

from knobwise import registration
from knobwise._version import __version__
from knobwise.common.lazy import lazy

if TYPE_CHECKING:
    from knobwise.api import KnobPolicy as KnobPolicy
    from knobwise.api import fit as fit
    from knobwise.api import load as load
    from knobwise.api import wrap as wrap
    from knobwise.experiments.report.policies import compare_policies as compare_policies
    from knobwise.reading import read as read

registration.register()

MODULES = dict.fromkeys(("KnobPolicy", "fit", "load"), "api")
MODULES["read"] = "reading"  # without what learns
MODULES["wrap"] = "serving.wrapper"  # without torch
MODULES["compare_policies"] = "experiments.report.policies"
__getattr__ = lazy(__name__, MODULES)
__all__ = ["__version__", *MODULES]
