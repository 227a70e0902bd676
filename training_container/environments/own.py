"""The plain form, as in gymnasium: `reset(**row) -> observation`, `step(action) -> observation, reward, done`.

`action` is the model's text. Either may be async. `reset` may add an info dict; `step` may add one, too, or give
gymnasium's five (observation, reward, terminated, truncated, info). Numbers in the info become metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..user_code import Refusal, accepted
from .protocol import Action, Awaiter, Turn, as_done, as_metrics, as_observation, as_reward, in_words


class OwnEpisode:
    """An object with `reset` and `step`."""

    def __init__(self, environment: Any, settle: Awaiter) -> None:
        self._environment, self._settle = environment, settle

    def begin(self, row: Mapping[str, Any]) -> Turn:
        by_position, by_name = accepted(self._environment.reset, row)
        observation = self._settle(self._environment.reset(*by_position, **by_name))
        if isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], dict):
            observation = observation[0]
        return Turn(as_observation(observation, "reset"))

    def act(self, action: Action) -> Turn:
        result = self._settle(self._environment.step(action.text))
        if not isinstance(result, tuple | list) or len(result) not in (3, 4, 5):
            raise Refusal(
                f"step gave a {type(result).__name__} ({in_words(result)}); "
                "give observation, reward, done, and at most an info dict"
            )
        observation, reward, *ends = result
        info = ends.pop() if len(ends) > 1 else {}
        done = any(as_done(end, "step") for end in ends)
        return Turn(
            None if done else as_observation(observation, "step"), as_reward(reward, "step"), done, as_metrics(info)
        )

    def grade(self) -> float | None:
        return None
