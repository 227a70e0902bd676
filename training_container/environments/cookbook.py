"""The form of tinker-cookbook's Env: `initial_observation()`, `step(action) -> StepResult`, sync or async.

An Env renders and parses for itself: its observations are token ids (or a ModelInput) of the *whole* context, and an action
is the list of sampled ids; `action.text` is there as well. An Env that gives texts or messages gives what is added, as in
the plain form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..user_code import Refusal
from .protocol import Action, Awaiter, Observation, Turn, as_done, as_metrics, as_observation, as_reward


class Tokens(list[int]):
    """An action as the cookbook has it, ids, with the text they stand for."""

    text: str

    @classmethod
    def of(cls, action: Action) -> Tokens:
        tokens = cls(action.ids)
        tokens.text = action.text
        return tokens


class CookbookEpisode:
    """An object with `initial_observation` and `step`; made with the row's columns, for it has no reset."""

    def __init__(self, environment: Any, settle: Awaiter) -> None:
        self._environment, self._settle = environment, settle

    def begin(self, row: Mapping[str, Any]) -> Turn:
        first = self._settle(self._environment.initial_observation())
        if isinstance(first, tuple) and len(first) == 2:
            first = first[0]  # beside it the stop condition, which is the model's own here
        observation = as_observation(first, "initial_observation")
        return Turn(observation, whole=_is_ids(observation))

    def act(self, action: Action) -> Turn:
        result = self._settle(self._environment.step(Tokens.of(action)))
        if not hasattr(result, "reward") or not hasattr(result, "episode_done"):
            raise Refusal(
                f"step gave a {type(result).__name__}; give a StepResult with reward, episode_done and next_observation"
            )
        done = as_done(result.episode_done, "step")
        observation = None if done else as_observation(getattr(result, "next_observation", None), "step")
        metrics = as_metrics(getattr(result, "metrics", None))
        return Turn(observation, as_reward(result.reward, "step"), done, metrics, whole=_is_ids(observation))

    def grade(self) -> float | None:
        return None


def _is_ids(observation: Observation) -> bool:
    return isinstance(observation, list) and bool(observation) and isinstance(observation[0], int)
