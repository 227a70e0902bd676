"""When a checkpoint is due: by steps, by seconds, at the end of an epoch, or as often as it pays.

    cadence = Cadence(spec.checkpoint, mtbf_s=…, now_s=…)
    if cadence.is_due(step, epoch_ended=…, now_s=…):
        …save…
        cadence.saved(now_s=…, stalled_s=…)
    cadence.written(took_s=…)             # later: it is on disk

What is `auto` begins with a checkpoint after the first step, whose cost then says how often it pays to save.
"""

from __future__ import annotations

from math import sqrt

from microtuning_core.domain.planning import steps_between_checkpoints
from microtuning_core.domain.spec import CheckpointSpec


def best_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of work between two checkpoints that lose least to saving and to what must be done again.

    sqrt(2 C M) - C, and M where a checkpoint costs more than that is worth (J. T. Daly, A higher order estimate of the
    optimum checkpoint interval for restart dumps, 2006, eqs. 20 and 37; first order, as Young 1974 less C).

    Args:
        cost_s: what training waits for one checkpoint.
        mtbf_s: mean time between failures.
    """
    return mtbf_s if cost_s >= 2 * mtbf_s else sqrt(2 * cost_s * mtbf_s) - cost_s


class Cadence:
    """When the next checkpoint is due. Whoever has a clock of its own decides by itself: processes must agree."""

    def __init__(self, spec: CheckpointSpec, *, mtbf_s: float, now_s: float) -> None:
        self._spec, self._mtbf_s = spec, mtbf_s
        self._every_steps = spec.every_steps if isinstance(spec.every_steps, int) else None
        self._is_auto = spec.every_steps == "auto" and spec.every_seconds is None
        self._saved_at_s = now_s
        self._stalled_s: float | None = None
        self._took_s = 0.0

    @property
    def asks_the_clock(self) -> bool:
        """Whether `is_due` depends on the time, which is another on every machine."""
        return self._is_auto or self._spec.every_seconds is not None

    @property
    def interval_s(self) -> float | None:
        """Seconds from one checkpoint to the next, where time decides; None before the first one has been measured.

        A disk, and the mirror behind it, have at least as long a rest as a checkpoint takes them.
        """
        if self._spec.every_seconds is not None:
            return float(self._spec.every_seconds)
        if not self._is_auto or self._stalled_s is None:
            return None
        return max(best_interval_s(self._stalled_s, self._mtbf_s), 2 * self._took_s)

    def fit_to(self, total_steps: int | None, *, steps_per_epoch: int) -> str | None:
        """A number of steps that would never save before the run's end is lowered; what to say of it, if it was."""
        ends_epochs = self._spec.every_epoch and total_steps is not None and steps_per_epoch < total_steps
        if self._every_steps is None or ends_epochs or self._spec.every_seconds is not None:
            return None
        self._every_steps, notice = steps_between_checkpoints(self._every_steps, total_steps)
        return notice

    def is_due(self, step: int, *, epoch_ended: bool = False, now_s: float) -> bool:
        by_steps = self._every_steps is not None and step % self._every_steps == 0
        return by_steps or (epoch_ended and self._spec.every_epoch) or self._time_is_up(now_s)

    def _time_is_up(self, now_s: float) -> bool:
        if not self.asks_the_clock:
            return False
        interval_s = self.interval_s
        return interval_s is None or now_s - self._saved_at_s >= interval_s

    def saved(self, *, now_s: float, stalled_s: float) -> None:
        """A checkpoint was begun, and training waited so long for it."""
        self._saved_at_s, self._stalled_s = now_s, stalled_s

    def written(self, *, took_s: float) -> None:
        """It is on disk, so long after it was begun."""
        self._took_s = took_s
