"""What a trainer takes as reward_func, in the words of the spec.

exact                                        {"entry": "code:function"}, and the function to pack
"reasoning_gym:leg_counting"                 {"entry": "reasoning_gym:leg_counting"}
[exact, (short, 0.1)]                        {"parts": {"exact": {…}, "short": {…, "weight": 0.1}}}
{"right": exact, "held_out": (judge, 0)}     the same under names of one's own; a weight of 0 only observes
a Run of RewardTrainer                       {"entry": "model:s3://…/checkpoints/l01/step-500/model/"}, and its "base"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from microtuning_core.domain.errors import InvalidCode, MicrotuningError
from microtuning_core.domain.layout import S3Uri, step_prefix
from microtuning_core.domain.run import RunStatus
from microtuning_core.domain.spec_checks import is_code
from microtuning_sdk._code import Piece
from microtuning_sdk._pickles import called
from microtuning_sdk._run import Run

# Until the code is packed, a function has a stand-in of an entry's form.
TO_BE_PACKED = "code:function"
GYM = "reasoning_gym:"


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A language model as judge, behind any OpenAI-compatible endpoint.

        Judge(base_url="https://api.example.com/v1", model="large", key_name="JUDGE_KEY",
              prompt="Question: {prompt} Answer: {completion} How good is it, from 0 to 10? End with the number.")

    prompt: with {prompt}, {completion} and any column in braces. The last number of the answer is the score, over `scale`.
    key_name: the name under which the key is kept (a Secrets Manager secret on AWS, an environment variable locally).
    max_requests: of the whole run; then it ends.
    """

    base_url: str
    model: str
    prompt: str
    key_name: str | None = None
    scale: float = 10.0
    max_requests_per_minute: int = 600
    max_requests: int | None = None
    retries: int = 3


Reward = Callable[..., Any] | str | Judge | Run
Document = dict[str, Any]


def reward_document(given: Any) -> tuple[Document, dict[str, Piece]]:
    """`(the spec's reward, what must be packed, by field)`.

    Raises:
        InvalidCode: nothing that scores. MicrotuningError: a run that is no finished run of RewardTrainer.
    """
    if not isinstance(given, Mapping | list) and not _is_weighted(given):
        entry, piece = _part(given)
        return entry, ({"reward.entry": piece} if piece else {})
    parts = dict(_named(given))
    if not parts:
        raise InvalidCode("reward_func", "it holds no reward", next_step="Give at least one.")
    document: Document = {}
    pieces: dict[str, Piece] = {}
    for name, each in parts.items():
        reward, weight = each if _is_weighted(each) else (each, None)
        document[name], piece = _part(reward)
        if weight is not None:
            document[name]["weight"] = weight
        if piece:
            pieces[f"reward.parts.{name}.entry"] = piece
    return {"parts": document}, pieces


def gym_task(document: Document) -> str | None:
    """The first reasoning-gym task among the rewards: it can make the data, too."""
    entries = [document.get("entry"), *(part.get("entry") for part in document.get("parts", {}).values())]
    return next((each.removeprefix(GYM) for each in entries if isinstance(each, str) and each.startswith(GYM)), None)


def _is_weighted(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], int | float)


def _named(given: Any) -> Iterator[tuple[str, Any]]:
    """Every part under a name of its own: its user's, or what a person calls it."""
    if isinstance(given, Mapping):
        yield from given.items()
        return
    taken: set[str] = set()
    for each in [given] if _is_weighted(given) else given:
        name = _name_of(each[0] if _is_weighted(each) else each)
        number = next(number for number in range(1, 1000) if _numbered(name, number) not in taken)
        taken.add(_numbered(name, number))
        yield _numbered(name, number), each


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}_{number}"


def _name_of(reward: Any) -> str:
    match reward:
        case Judge():
            return "judge"
        case Run():
            return "model"
        case str() if reward.startswith(("http", "arn:", "model:")):
            return reward.partition(":")[0].replace("arn", "lambda")
        case str():
            text = reward.rpartition(":")[2]
        case _:
            text = called(reward)
    name = re.sub(r"\W+", "_", text.replace("<lambda>", "lambda").rpartition(".")[2]).strip("_")[:30]
    return name if name[:1].isalpha() else f"reward_{name}".rstrip("_")


def _part(reward: Any) -> tuple[Document, Piece | None]:
    if isinstance(reward, Judge):
        settings = {name: value for name, value in asdict(reward).items() if value is not None}
        return {"entry": "judge", "judge": settings}, None
    if isinstance(reward, Run):
        entry, base = f"model:{reward_model_of(reward)}", _base_of(reward)
        return {"entry": entry, "base": base} if base else {"entry": entry}, None
    if isinstance(reward, str) and not is_code(reward):
        return {"entry": reward}, None
    if isinstance(reward, Sequence) and not isinstance(reward, str):
        raise InvalidCode(repr(reward), "it is neither a reward nor a pair of a reward and its weight")
    return {"entry": TO_BE_PACKED}, Piece(reward, "reward")


def _base_of(run: Run) -> str | None:
    """The model in S3 that the run's adapter belongs to; one of the hub is named in the adapter's own file."""
    model = run.record.spec.model
    is_adapter = model.effective_adapter != "none"
    return model.base if is_adapter and model.base and model.base.startswith("s3://") else None


def reward_model_of(run: Run) -> str:
    """Where the model of a finished run of RewardTrainer lies; a folder's address.

    Raises:
        MicrotuningError: the run trains something else, or is not over.
    """
    record = run.record
    if record.spec.algorithm.type != "reward":
        raise MicrotuningError(
            f"Run {run.run_id} is a run of {record.spec.algorithm.type} and has no reward model.",
            next_step="Give a run of RewardTrainer as reward_func.",
        )
    whole = [(each.lineage, each.step) for each in run.checkpoints() if each.whole]
    if record.status is not RunStatus.COMPLETED or not whole:
        raise MicrotuningError(
            f"Run {run.run_id} is {record.status}, so its reward model is not finished.",
            next_step="Wait for it (run.wait()), or name a checkpoint's model as 'model:s3://…/model/'.",
        )
    return str(S3Uri(run.stage.bucket, f"{step_prefix(run.run_id, *max(whole))}model/"))
