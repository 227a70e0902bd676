"""How long a machine lasts: what is assumed at first, and what a run has seen since.

No vendor publishes these times; what is assumed is common practice, and a wrong guess costs little: the overhead of
checkpoints changes with its square root. SageMaker's own spot figures (frequency of interruption, below 5 % up to above
20 % a month) are no times either.
"""

from __future__ import annotations

from collections.abc import Sequence

from microtuning_core.domain.failures import AttemptSummary, FailureClass

ON_DEMAND_MTBF_S = 7 * 86_400
SPOT_MTBF_S = 4 * 3_600
LEAST_MTBF_S = 60

_MACHINES_FAULT = frozenset({FailureClass.PLATFORM, FailureClass.INTERRUPTED})


def mtbf_s(*, spot: bool, count: int, history: Sequence[AttemptSummary] = ()) -> int:
    """Mean time in s between failures of an attempt on `count` instances.

    The mean of the posterior rate where one failure in the assumed time was seen before: (assumed + seen seconds) over
    (1 + seen failures), over all attempts of that kind; any of several machines that fails stops all.
    """
    alike = [each for each in history if each.spot == spot]
    failures = sum(each.recoveries + (each.failure_class in _MACHINES_FAULT) for each in alike)
    assumed_s = (SPOT_MTBF_S if spot else ON_DEMAND_MTBF_S) / count
    return max(LEAST_MTBF_S, round((assumed_s + sum(each.billed_s for each in alike)) / (1 + failures)))
