"""Every error a caller may want to catch, as one tree.

MicrotuningError                  base; one sentence and the next step            (next_step)
├── InvalidName                   a name or id that can never work                (value, rule)
├── InvalidSpec                   the request can never work; fix it              (problems: field, line, message)
├── InvalidData                   a data set that cannot be used                  (file, line, reason)
├── InvalidCode                   user code that cannot travel to the job         (object_name, reason)
├── RunWouldFail                  preflight found what would end the run          (found)
├── InvalidStage                  a stage's configuration that can never work     (file, problems)
├── UnknownTenant                 the stage serves no such tenant                 (tenant)
├── RunNotFound                   no such run in this stage                       (run_id)
├── StaleRevision                 somebody else wrote first; read again           (run_id, expected)
├── IllegalTransition             a status cannot follow another                  (run_id, current, wanted)
├── NothingFits                   no instance type holds this model               (needed_gib, largest_gib)
├── BudgetExceeded                the cheapest fit costs more than the budget     (budget_usd, cheapest_usd)
├── LaunchRefused                 the service refused CreateTrainingJob for good  (failure_class, reason)
├── NotYetWhole                   files are still arriving; look again later      (what)
├── RunFailed                     a run that was waited for failed                (run_id, reason)
├── RunStopped                    a run that was waited for was stopped           (run_id, reason)
├── SubmitRefused                 the stage answered a submit with errors         (errors)
├── StageUnreachable              a stage cannot be reached or does not answer    (stage)
└── LocalCloudError               the local cloud cannot start or answer          (log_path)
    └── LocalRequestRefused       it was asked for what it cannot do

To add one: give it a place in the tree above, keep its data as attributes, and write the message as one sentence plus
what to do next. The full stop between the two is set here, whatever the parts end with.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal


def sentence(text: str) -> str:
    """`text` with one full stop at its end, also where it quotes a message that brought its own."""
    bare = text.strip().rstrip(" .")
    return bare if not bare or bare.endswith(("!", "?", "…")) else f"{bare}."


def a(noun: str) -> str:
    """The noun with its article: "a float", "an int", "an S3 URI"."""
    return f"an {noun}" if noun[:1] in tuple("aeioAEIO") or noun.startswith("S3") else f"a {noun}"


class MicrotuningError(Exception):
    """Base of all. `next_step` says what the reader can do about it; it ends the message."""

    def __init__(self, message: str, *, next_step: str = "") -> None:
        self.message, self.next_step = sentence(message), sentence(next_step)
        super().__init__(f"{self.message} {self.next_step}".strip())


class InvalidName(MicrotuningError):
    """A stage, tenant, run, job name or key that does not follow its rule."""

    def __init__(self, kind: str, value: str, rule: str) -> None:
        named = a(kind)
        super().__init__(f"{value!r} is not a valid {kind}", next_step=f"{named[0].upper()}{named[1:]} is {rule}")
        self.kind, self.value, self.rule = kind, value, rule


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a spec: `field` as a dotted path, `line` of the file where known."""

    field: str
    message: str
    line: int | None = None

    def __str__(self) -> str:
        where = f"{self.field} (line {self.line})" if self.line else self.field
        return f"{where}: {self.message.rstrip(' .')}"

    def as_dict(self) -> dict[str, str | int | None]:
        return {"field": self.field, "line": self.line, "message": self.message}


class InvalidSpec(MicrotuningError):
    """A run spec that can never work. All problems are listed, not just the first."""

    def __init__(self, problems: list[Problem]) -> None:
        listed = "; ".join(str(problem) for problem in problems)
        super().__init__(f"The spec is not valid: {listed}", next_step="Correct these fields and submit again.")
        self.problems = problems


class InvalidStage(MicrotuningError):
    """A stage's configuration that cannot be deployed. All problems are listed, each with its line."""

    def __init__(self, file: str, problems: list[Problem]) -> None:
        listed = "; ".join(str(problem) for problem in problems)
        super().__init__(f"{file} is not valid: {listed}", next_step="Correct it and deploy again.")
        self.file, self.problems = file, problems


class UnknownTenant(MicrotuningError):
    """The stage declares no such tenant and takes no others."""

    def __init__(self, tenant: str, declared: tuple[str, ...]) -> None:
        listed = ", ".join(declared[:8]) + (" …" if len(declared) > 8 else "")
        super().__init__(
            f"This stage has no tenant {tenant!r}, it has {listed}",
            next_step="Name one of these, or declare it in infrastructure/stages/<stage>.yaml and deploy.",
        )
        self.tenant = tenant


class InvalidData(MicrotuningError):
    """A data set that cannot be used. `line` counts from 1 and is None when the whole file is at fault."""

    def __init__(self, file: str, reason: str, *, line: int | None = None, next_step: str = "") -> None:
        where = f"{file}, line {line}" if line else file
        super().__init__(f"{where}: {reason}", next_step=next_step or "Correct the file and submit again.")
        self.file, self.line, self.reason = file, line, reason


class InvalidCode(MicrotuningError):
    """User code (a reward function, say) that cannot be sent to the job."""

    def __init__(self, object_name: str, reason: str, *, next_step: str = "") -> None:
        super().__init__(f"{object_name} cannot travel to the training job: {reason}", next_step=next_step)
        self.object_name, self.reason = object_name, reason


class RunWouldFail(MicrotuningError):
    """Preflight tried the run's own code and data here, and they fail here as they would in the job."""

    def __init__(self, found: str, *, next_step: str = "") -> None:
        super().__init__(f"The run would fail: {found}", next_step=next_step)
        self.found = found


class RunNotFound(MicrotuningError):
    def __init__(self, run_id: str) -> None:
        super().__init__(f"There is no run {run_id!r}.", next_step="See `microtuning runs list`.")
        self.run_id = run_id


class StaleRevision(MicrotuningError):
    """A conditional write lost: the record is no longer at the revision that was read."""

    def __init__(self, run_id: str, expected: int) -> None:
        super().__init__(
            f"Run {run_id} is no longer at revision {expected}.", next_step="Read it again and decide again."
        )
        self.run_id, self.expected = run_id, expected


class IllegalTransition(MicrotuningError):
    def __init__(self, run_id: str, current: str, wanted: str) -> None:
        super().__init__(
            f"Run {run_id} is {current} and cannot become {wanted}.", next_step="Read the run again; it moved on."
        )
        self.run_id, self.current, self.wanted = run_id, current, wanted


class NothingFits(MicrotuningError):
    def __init__(self, needed_gib: float, largest_gib: float, *, what: str = "This run") -> None:
        super().__init__(
            f"{what} needs about {needed_gib:.1f} GiB and the largest type that may be used has {largest_gib:.1f} GiB.",
            next_step="Use LoRA, a shorter max_length, a smaller model, or name compute.instance.",
        )
        self.needed_gib, self.largest_gib = needed_gib, largest_gib


class BudgetExceeded(MicrotuningError):
    def __init__(self, budget_usd: Decimal, cheapest_usd: Decimal, instance_type: str) -> None:
        super().__init__(
            f"The cheapest plan costs {cheapest_usd} USD ({instance_type}) and the budget is {budget_usd} USD.",
            next_step="Raise budget_usd or choose a smaller model.",
        )
        self.budget_usd, self.cheapest_usd, self.instance_type = budget_usd, cheapest_usd, instance_type


class LaunchRefused(MicrotuningError):
    """SageMaker refused CreateTrainingJob; `failure_class` says whether to wait, to replan or to give up."""

    def __init__(self, failure_class: str, reason: str) -> None:
        super().__init__(f"SageMaker refused the training job ({failure_class}): {reason}")
        self.failure_class, self.reason = failure_class, reason


class NotYetWhole(MicrotuningError):
    """Something was announced before all of it was there; the message goes back to its queue."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is not whole yet.", next_step="It is looked at again when the message returns.")
        self.what = what


class RunFailed(MicrotuningError):
    def __init__(self, run_id: str, reason: str) -> None:
        super().__init__(f"Run {run_id} failed: {reason}", next_step=f"See `microtuning runs logs {run_id}`.")
        self.run_id, self.reason = run_id, reason


class RunStopped(MicrotuningError):
    def __init__(self, run_id: str, reason: str) -> None:
        super().__init__(f"Run {run_id} was stopped: {reason}", next_step=f"See `microtuning runs show {run_id}`.")
        self.run_id, self.reason = run_id, reason


class SubmitRefused(MicrotuningError):
    """The receipt of a submitted spec holds errors: nothing was started."""

    def __init__(self, errors: list[Problem]) -> None:
        listed = "; ".join(str(error) for error in errors)
        super().__init__(f"Nothing was started: {listed}", next_step="Correct the spec and submit again.")
        self.errors = errors


class CommandRefused(MicrotuningError):
    """What was asked of a run cannot be done: nothing was changed."""

    def __init__(self, run_id: str, errors: list[Problem]) -> None:
        listed = "; ".join(str(error) for error in errors)
        about_step = any(error.field == "step" for error in errors)
        next_step = f"See `microtuning checkpoints {run_id}`." if about_step else "Correct it and ask again."
        super().__init__(f"Nothing was changed: {listed}", next_step=next_step)
        self.run_id, self.errors = run_id, errors


class StageUnreachable(MicrotuningError):
    """No credentials, no region, no deployed stack, or no answer from it in time."""

    def __init__(self, stage: str, reason: str, *, next_step: str = "") -> None:
        super().__init__(
            f"The stage {stage!r} {reason}", next_step=next_step or f"See `microtuning doctor --stage {stage}`."
        )
        self.stage, self.reason = stage, reason


class LocalCloudError(MicrotuningError):
    """The local cloud cannot start or answer. Every place says its own next step, or which log tells more."""

    def __init__(self, message: str, *, next_step: str = "", log_path: str = "") -> None:
        super().__init__(message, next_step=next_step or (f"See {log_path}" if log_path else ""))
        self.log_path = log_path


class LocalRequestRefused(LocalCloudError):
    """The local cloud runs, and was asked for what it cannot do: a job that is not there, say."""
