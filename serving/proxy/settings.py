"""The settings of `knobwise serve`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from knobwise.common.checks import at_least, one_of, positive
from knobwise.common.errors import InputError

TIMED = ("answer", "first_chunk")


@dataclass
class ServeRun:
    """knobwise serve: a controller in front of language models that speak the OpenAI protocol. It
    sets the knobs of each request to /v1/chat/completions or /v1/responses, and passes it on."""

    checkpoint: str = "runs/latest"
    """The controller: an exported controller.npz or the folder of one, such as updated/current; a
    run folder (its deployed policy), or a checkpoint file."""
    rule: str | None = None
    """The rule of a run that was trained under one of your own, as module:Class. It is imported."""
    endpoint: str | None = None
    """Where the models answer, such as http://127.0.0.1:8001/v1. Its key is read from the
    environment, OPENAI_API_KEY. None: nothing is passed on, and /decide alone decides."""
    host: str = "127.0.0.1"
    """The address to listen at; 0.0.0.0 for all of this machine. If KNOBWISE_TOKEN is set in the
    environment, every request must bring it as its bearer token."""
    port: int = 8000
    """The port to listen at; 0 for any that is free."""
    workers: int = 1
    """Number of processes that serve. One that dies is replaced."""
    budget_ms: float | None = None
    """The deadline of requests that bring none, in ms; or their budget, in the controller's unit,
    such as USD. None for the largest that the controller was calibrated for."""
    prices: str | None = None
    """A YAML file of US dollars for a million tokens by model, such as {small: {input: 0.1, output:
    0.4}}. What each answer cost is then logged as `usd` and counted in /metrics; a streamed one
    only if its client asks for the usage."""
    extra_body: Any = None
    """Further fields of every request, unless a client sets them, such as {max_tokens: 256}; give
    what the profile was measured with. A knob of the same name sets the field. `model` counts where
    a client leaves it open: `knobwise`, `auto` or none."""
    messages: str | None = None
    """module:function(question, knobs), which returns the messages that stand for the user's last
    one, after those that the client has before it. Knobs that are no field of a request need it;
    give the same as when the profile was measured."""
    features: str | None = None
    """module:function(body), plain or async, which returns the features of a request by name. What
    a request brings itself, as `features`, goes before."""
    prompt: str | None = None
    """The name of the feature that is the text of the user's last message; None for the only text
    that the controller reads, or else `prompt`."""
    log: str = "served"
    """The folder of the log of requests, which `knobwise update` reads."""
    log_prompts: bool = False
    """Write the user's last message into the log too. Feature blocks are in it in any case."""
    explore: float = 0.0
    """The share of requests that get a random configuration instead of the best; without any, no
    update can replace the controller."""
    explore_loss: float = 0.05
    """The utility that these are expected to lose at most, in units of accuracy."""
    tracker: bool = True
    """Follow the drift of latencies by the times of answers."""
    watch: str | None = None
    """A controller.npz, or the folder of one such as updated/current, to switch to whenever it is
    replaced."""
    override: bool = False
    """Set the knobs whatever a client sets itself. Otherwise its `max_tokens` is a cap, and other
    values that it gives are kept."""
    concurrency: int | None = None
    """How many requests the profile was measured with at once; None for what the run's profile
    says. With more under way, answers may take longer than predicted: the server warns once, and
    counts such requests in /metrics."""
    shadow: bool = False
    """Log what would be chosen, and send each request as the client wrote it, with `default`."""
    default: Any = None
    """With `shadow`: the configuration that is sent, a value for each knob; None for the choice of
    static."""
    timed: str = "answer"
    """What must come before the deadline: the whole answer, or the first_chunk of one that is
    streamed; as in the profile."""
    timeout_s: float = 600.0
    """Seconds that the endpoint may keep silent."""
    drain_s: float = 10.0
    """Seconds that requests under way have to end when the server is stopped."""
    max_body_mb: float = 20.0
    """The largest request, in MB."""
    opened: list[str] = field(default_factory=list)
    """Further paths below /v1 that pass to the endpoint as they come, with all below them, such as
    [files, batches]; with the operator's key, if there is one."""
    names: list[str] = field(default_factory=list)
    """Further host names under which clients ask, such as that of a proxy before this server."""

    def __post_init__(self) -> None:
        one_of("timed", self.timed, TIMED)
        at_least("workers", self.workers, 1)
        if self.concurrency is not None:
            at_least("concurrency", self.concurrency, 1)
        at_least("drain_s", self.drain_s, 0)
        for name in ("timeout_s", "max_body_mb"):
            positive(name, getattr(self, name))
        if not 0 <= self.port < 65536:
            raise InputError(f"port={self.port}: must be 0 to 65535")
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise InputError(f"endpoint={self.endpoint}: must begin with http:// or https://")
        if self.endpoint is not None and "#" in self.endpoint:
            raise InputError(f"endpoint={self.endpoint}: must hold no fragment, #…")
        for path in self.opened:
            if not all(part.strip(".") for part in path.strip("/").split("/")):
                raise InputError(f"opened: {path!r} must be a path below /v1, such as files")
        if self.shadow and self.explore:
            raise InputError("shadow=true: sends nothing that is drawn; leave out explore")
        if self.default is not None and not self.shadow:
            raise InputError("default: is for shadow=true")
        for name in ("default", "extra_body"):
            if not isinstance(getattr(self, name), dict | None):
                raise InputError(f"{name}: must be values by name, {{name: value, …}}")
