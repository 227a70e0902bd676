"""Losses as pure functions of log-probabilities: one family a file.

Axes: N the trained tokens of a micro-batch, laid end to end (prompts and padding are not among them) · B rows · T tokens of
a row · P prompts · G completions of a prompt. Log-probabilities are in nats.

Every loss has the form `(logprobs_N, batch) -> loss, metrics`, a user's own as well, and both results are shares of the
whole step's: a mean over tokens divides by `batch.totals.tokens`, one over rows by `batch.totals.rows`, never by what the
micro-batch holds. So the sum over micro-batches (and processes) is the value of the full batch, however it was cut.

To add one: a function here with its numbers worked by hand in a test, then a recipe that uses it.
"""

from .kl import kl
from .policy import Objective, policy_loss
from .preference import bradley_terry_loss, dpo_loss, kto_loss, orpo_loss
from .supervised import cross_entropy

__all__ = [
    "Objective",
    "bradley_terry_loss",
    "cross_entropy",
    "dpo_loss",
    "kl",
    "kto_loss",
    "orpo_loss",
    "policy_loss",
]
