"""The distribution that a selector draws from, over ordered sequences of different places of a
query's pool."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from knobwise.agents.selector.networks import Encoded, PointerNetwork
from knobwise.losses.functional import entropy


class SequenceDistribution:
    """A distribution over ordered sequences of T different places of the pool, drawn one after the
    other without replacement.

    ln π(a) = Σ_t ln softmax(logits_t)[a_t] over the places left at step t (Plackett 1975, "The
    Analysis of Permutations", with logits that depend on what was chosen). Probabilities sum to 1
    over all sequences. If a pool has fewer than T candidates, a sequence ends when no place is
    left; the rest of it is −1 and adds 0.

    Args:
        network: the network that points.
        encoded: P queries with their pools of N places, from the network's `encode`.
        shots: T.
        temperature: divides the logits, for draws, log-probs and entropy alike.
    """

    def __init__(
        self,
        network: PointerNetwork,
        encoded: Encoded,
        shots: int,
        temperature: Tensor | float = 1.0,
    ) -> None:
        self.network = network
        self.encoded = encoded
        self.shots = shots
        self.temperature = temperature

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probs [P, J] of J sequences of each query, int64 [P, J, T].

        −1 after the end of a shorter sequence adds 0, so its log-prob is that of the part before.
        The log-prob is −∞, without a gradient, if a place was chosen before, is not in the pool, or
        follows the end. T need not be that of the draws.
        """
        size = self.encoded.mask.shape[-1]
        inside = value.clamp(0, size - 1)
        # at each step, a place is available unless an earlier step took it: [P, J, T, N]
        taken = value.unsqueeze(-1) == torch.arange(size, device=value.device)
        available = self.encoded.mask[:, None, None] & (taken.cumsum(2) == taken)
        states = self.network.states(self.encoded, self._keys(inside[..., :-1]))
        log_probs = _of_chosen(self._log_probs(states, available), inside)
        # not available, not a place of the pool, or after the end
        padding = value == -1
        free = available.gather(-1, inside.unsqueeze(-1)).squeeze(-1)
        wrong = ~free | (inside != value) | (padding.cumsum(-1) > 0)
        return log_probs.masked_fill(wrong, -torch.inf).masked_fill(padding, 0.0).sum(-1)

    @torch.no_grad()
    def sample_with_log_prob(
        self, count: int = 1, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw J = `count` sequences of each query, int64 [P, J, T], along with their log-probs.

        This saves the run of the network that `log_prob` would take. Without a generator the draws
        are torch's global ones.
        """
        places, log_probs = self._draw(count, generator)
        return places, _of_chosen(log_probs, places).masked_fill(places < 0, 0.0).sum(-1)

    def entropy(self) -> Tensor:
        """Return an unbiased estimate of the entropy, [P], in nats.

        It is the sum of the exact entropies of the steps along a single drawn sequence
        (Rao-Blackwellised), so only the prefixes are left to chance, and T = 1 is exact. The
        gradient is that of the steps' entropies, and leaves out how the probabilities of prefixes
        change. The sequence is drawn with its own generator, always with the same seed, so it does
        not change the draws of training.
        """
        generator = torch.Generator(self.encoded.keys.device).manual_seed(0)
        places, log_probs = self._draw(1, generator)
        return entropy(log_probs).masked_fill(places < 0, 0.0).sum(-1).squeeze(1)

    @property
    def mode(self) -> Tensor:
        """The greedy sequence, the most probable place at every step, int64 [P, T]."""
        with torch.no_grad():
            return self._draw(1, greedy=True)[0][:, 0]

    def _draw(
        self, count: int, generator: torch.Generator | None = None, greedy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Draw J sequences of each query, or its greedy sequence.

        Returns:
            Places, int64 [P, J, T], and the log-probs of every step, [P, J, T, N].
        """
        # from the start state, with the whole pool
        network = self.network
        mask = self.encoded.mask
        state = network.start(self.encoded, count)
        available = mask.unsqueeze(1).expand(-1, count, -1)
        places = []
        steps = []
        for step in range(self.shots):
            # point at a place of what is left
            log_probs = self._log_probs(network.point(state), available)
            if greedy:
                drawn = log_probs.argmax(-1, keepdim=True)
            else:
                probs = log_probs.detach().exp().flatten(0, 1)
                drawn = torch.multinomial(probs, 1, generator=generator)
                drawn = drawn.unflatten(0, log_probs.shape[:2])
            # take it out of the pool, and read its key
            places.append(drawn.masked_fill(~available.any(-1, keepdim=True), -1))
            steps.append(log_probs)
            available = available.scatter(-1, drawn, False)
            if step < self.shots - 1:
                state = network.advance(state, self._keys(drawn.squeeze(-1)))
        return torch.cat(places, -1), torch.stack(steps, 2)

    def _log_probs(self, states: Tensor, available: Tensor) -> Tensor:
        """Return log-probs of the next place, [P, *, N], −∞ where it is not available.

        If no place is available they are those of a full pool: nobody reads them, and values and
        gradients stay finite.
        """
        logits = self.network.logits(states, self.encoded) / self.temperature
        masked = ~available & available.any(-1, keepdim=True)
        return logits.masked_fill(masked, -torch.inf).log_softmax(-1)

    def _keys(self, places: Tensor) -> Tensor:
        """Return the keys of places in the queries' own pools, int64 [P, *] → [P, *, h]."""
        queries, size, width = self.encoded.keys.shape
        # a lookup in the keys of all pools, each of which begins `size` rows after the last
        first = torch.arange(0, queries * size, size, device=places.device)
        rows = places + first.view(-1, *[1] * (places.dim() - 1))
        return F.embedding(rows, self.encoded.keys.reshape(queries * size, width))


def _of_chosen(log_probs: Tensor, places: Tensor) -> Tensor:
    """Return the log-probs of chosen places: [P, J, T, N] and int64 [P, J, T] → [P, J, T]."""
    return log_probs.gather(-1, places.clamp_min(0).unsqueeze(-1)).squeeze(-1)
