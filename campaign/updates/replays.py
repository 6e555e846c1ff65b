"""One replay: a log, an update, and what the true outcomes say about it."""

from typing import NamedTuple
from unittest.mock import patch

from campaign.updates.kinds import FEWER_LABELS, POISONED, SOUND
from campaign.updates.worlds import Log, served
from knobwise.agents.learning import adaptation
from knobwise.agents.learning import update as update_module
from knobwise.agents.learning.update import Update, update

WORSE = -0.5
"""A change below this many points is a harm."""
STEPS = 60
FOLDS = 2
"""Steps in which heads are taught again, and parts of a log; fewer than in `knobwise update`."""
GAIN = 3
"""A gain of so many points should be taken."""


class Replay(NamedTuple):
    """What came of an update, in points of true utility."""

    better: bool
    """Whether it took over."""
    change: float
    """Of what serves then."""
    accepted: bool
    """Whether it takes over with accept=true."""
    possible: float
    """Of what serves with accept=true."""
    result: Update


def replay(kind, seed, accepts=True):
    """Replay one kind of log; without `accepts`, what accept=true would change is left out."""
    log = Log(seed, SOUND.get(kind))
    if tamper := (FEWER_LABELS | POISONED).get(kind):
        tamper(log)
    with patch.object(adaptation, "STEPS", STEPS), patch.object(update_module, "FOLDS", FOLDS):
        result = update(served().agent, log.logged())
        accepted = result
        if accepts and any(result.objections.values()):
            accepted = update(served().agent, log.logged(), accept=True)
    changes = [change_of(each, log.world) for each in (result, accepted)]
    return Replay(result.better, changes[0], accepted.better, changes[1], result)


def change_of(result, world):
    """The change of true utility by an update, in points; 0 if the old controller goes on."""
    if not result.better:
        return 0.0
    base = served()
    new = world.utility(base.decided(result.agent), base.budgets)
    return 100 * (new - world.utility(base.best, base.budgets))
