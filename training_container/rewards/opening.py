"""From the settings of a reward to something that scores: one part a kind, their weighted sum as the reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..failures import UserFailure
from .process import FunctionReward
from .scores import Answers, Question, Reward, Scores, combined

if TYPE_CHECKING:
    from microtuning_core.domain.algorithms import RewardPart, RewardSpec

    from ..engine.parallel import World
    from ..metrics import EventLog


_MAX_IN_VAIN = 3


@dataclass(frozen=True)
class Surroundings:
    """What a part may need of the run around it.

    code: the folder with the user's sources. model_channel: from the name of a channel to its folder. device: of torch,
    for a reward model. keep: a folder that outlives the job's machine, for answers that were paid for.
    """

    code: Path
    seed: int
    time_limit_s: float
    log: EventLog
    model_channel: Callable[[str], Path]
    device: Any = "cpu"
    keep: Path | None = None


class Rewards:
    """Every part of a run's reward; a context manager that ends their processes on exit."""

    def __init__(
        self, parts: Mapping[str, Reward], weights: Mapping[str, float], *, world: World | None = None
    ) -> None:
        self._parts, self._weights, self._world = dict(parts), dict(weights), world
        self._threads = ThreadPoolExecutor(max_workers=max(1, len(parts)), thread_name_prefix="rewards")

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(self, question: Question, *, step: int) -> Scores:
        """One score a completion, in their order. `step` is the one that is being made, from 1 on.

        Where several processes train together the main one asks, and all of them have its answer.

        Raises:
            UserFailure: a part raised, or answered what is no score.
        """
        return self._world.once(lambda: self._score(question, step)) if self._world else self._score(question, step)

    def _score(self, question: Question, step: int) -> Scores:
        """The parts at the same time: each waits for a process or a server of its own."""
        asked = {name: self._threads.submit(part.score, question, step=step) for name, part in self._parts.items()}
        answers: dict[str, Answers] = {name: each.result() for name, each in asked.items()}
        return combined(answers, self._weights)

    def close(self) -> None:
        for part in self._parts.values():
            part.close()
        self._threads.shutdown()


def open_rewards(
    spec: RewardSpec,
    code: Path,
    *,
    seed: int,
    log: EventLog,
    model_channel: Callable[[str], Path],
    device: Any = "cpu",
    keep: Path | None = None,
    world: World | None = None,
) -> Rewards:
    """The run's reward, loaded and ready; to be closed, or used in a `with`.

    Raises:
        UserFailure: a part cannot be loaded, with the user's file and line.
    """
    weights = {name: part.weight for name, part in spec.named_parts.items()}
    around = Surroundings(code, seed, spec.time_limit_s, log, model_channel, device, keep)
    opened: dict[str, Reward] = {}
    if world is None or world.is_main:
        try:
            for name, part in spec.named_parts.items():
                opened[name] = Patient(open_part(name, part, around), part.entry, spec.time_limit_s, log)
        except BaseException:
            Rewards(opened, weights).close()
            raise
    return Rewards(opened, weights, world=world)


def open_part(name: str, part: RewardPart, around: Surroundings) -> Reward:
    """What an entry stands for. To add a kind: a file beside this one, and its line here. Heavy libraries wait for it."""
    entry, limit_s = part.entry, around.time_limit_s
    if entry.startswith(("http://", "https://")):
        from .http import HttpReward

        return HttpReward(entry, time_limit_s=limit_s)
    if entry.startswith("arn:"):
        from ..remote.lambda_reward import LambdaReward

        return LambdaReward(entry, time_limit_s=limit_s)
    if entry.startswith("model:"):
        from microtuning_core.domain.spec import reward_base_channel, reward_model_channel

        from .model import ModelReward

        base = around.model_channel(reward_base_channel(name)) if part.base else None
        return ModelReward(around.model_channel(reward_model_channel(name)), base=base, device=around.device)
    if part.judge is not None:
        from .judge import FOLDER, JudgeReward

        keep = around.keep / FOLDER if around.keep else None
        key = _key_named(part.judge.key_name) if part.judge.key_name else None
        return JudgeReward(name, part.judge, time_limit_s=limit_s, keep=keep, key=key)
    return FunctionReward(entry, around.code, time_limit_s=limit_s, seed=around.seed)


def _key_named(name: str) -> str:
    from ..remote.secrets import key_named

    return key_named(name)


class Patient:
    """A part that may fail to answer a few times, and not for ever."""

    def __init__(self, reward: Reward, entry: str, time_limit_s: float, log: EventLog) -> None:
        self._reward, self._entry, self._time_limit_s, self._log = reward, entry, time_limit_s, log
        self._in_vain = 0

    def score(self, question: Question, *, step: int) -> Answers:
        """As Reward.score.

        Raises:
            UserFailure: as there; or three steps in a row not one completion got an answer.
        """
        answers = self._reward.score(question, step=step)
        late = sum(each.timed_out for each in answers.each)
        if late and answers.cause:
            message = f"the reward {self._entry} did not answer for {late} completions: {answers.cause}"
            self._log.emit("notice", step=step, message=message)
        nothing = 0 < late == len(answers.each)
        self._in_vain = self._in_vain + 1 if nothing else 0
        if self._in_vain >= _MAX_IN_VAIN:
            cause = f": {answers.cause}" if answers.cause else ""
            raise UserFailure(
                f"The reward {self._entry} gave no score within reward.time_limit_s = {self._time_limit_s:g} s in "
                f"{self._in_vain} steps in a row{cause}. Make it faster or raise the limit."
            )
        return answers

    def close(self) -> None:
        self._reward.close()
