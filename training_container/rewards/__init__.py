"""Rewards: what scores completions. One kind of reward a file.

process.py, worker.py, functions.py   functions of the user's, in processes that can be killed
judge.py, verdict.py                  a language model as judge, and the number it meant
gym.py                                reasoning-gym's tasks, in the same
scores.py                             questions, answers, and the weighted sum of several rewards
opening.py                            from the settings to all of it
"""

from .opening import Rewards, open_rewards
from .scores import NOT_SCORED, Answer, Answers, Question, Reward, Scores

__all__ = [
    "NOT_SCORED",
    "Answer",
    "Answers",
    "Question",
    "Reward",
    "RewardFunction",
    "Rewards",
    "Scores",
    "open_rewards",
]
