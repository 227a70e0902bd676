"""Playing episodes: the model's turns drawn for all that are live at once, the environments' answers between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from microtuning_core.domain.datasets import Row

from ..engine import Completion, Engine, Sampling
from ..failures import UserFailure
from ..run import Run
from .pool import Environments
from .protocol import Turn
from .transcript import Scribe, Transcript

# Episodes that are live at once: each has a process.
AT_ONCE = 128
_MAX_FRUITLESS = 3
Answer = TypeVar("Answer")


@dataclass
class Stage:
    """Where episodes are played. User code runs with the main process alone, which tells the others what came of it.

    room: tokens an episode may have before a turn. fruitless: calls of `play` in a row of which every episode timed out.
    """

    engine: Engine
    scribe: Scribe
    environments: Environments
    max_steps: int
    room: int
    fruitless: int = 0

    def ask(self, question: Callable[[Environments], Answer]) -> Answer:
        return self.engine.world.once(lambda: question(self.environments))


@contextmanager
def open_stage(engine: Engine, run: Run) -> Iterator[Stage]:
    """Load the user's environment; its processes end with the context."""
    asked, settings = run.spec.environment, run.settings
    environments = Environments(
        asked.entry or "", run.job.tree.code, options=asked.options, time_limit_s=asked.time_limit_s
    )
    scribe = Scribe(engine.tokenizer, engine.stop_tokens)
    room = settings.max_length - settings.max_completion_tokens
    try:
        engine.world.once(environments.open)
        yield Stage(engine, scribe, environments, asked.max_steps, room)
    finally:
        environments.close()


def play(
    stage: Stage, rows: Sequence[Row], seeds: Sequence[int], sampling: Sampling, *, group_size: int = 1
) -> list[Transcript]:
    """`group_size` episodes of each row, row by row; those of a row begin with the same seed.

    Raises:
        UserFailure: what user code raised, or three calls in a row in which no episode was answered in time.
    """
    at_once = max(1, AT_ONCE // group_size)
    parts = range(0, len(rows), at_once)
    played = [
        transcript
        for start in parts
        for transcript in _play(
            stage, rows[start : start + at_once], seeds[start : start + at_once], sampling, group_size
        )
    ]
    stage.fruitless = stage.fruitless + 1 if all(each.timed_out for each in played) else 0
    if stage.fruitless >= _MAX_FRUITLESS:
        raise UserFailure(
            f"No environment answered within environment.time_limit_s in {stage.fruitless} rollouts in a row. Make it "
            "faster or raise the limit."
        )
    return played


def _play(
    stage: Stage, rows: Sequence[Row], seeds: Sequence[int], sampling: Sampling, group_size: int
) -> list[Transcript]:
    """Episodes of these rows, all at once; those that are over drop out."""
    of_episodes = [(row, seed) for row, seed in zip(rows, seeds, strict=True) for _ in range(group_size)]
    values = [row.values for row, _ in of_episodes]
    first = stage.ask(lambda environments: environments.begin(values, [seed for _, seed in of_episodes]))
    transcripts = [_begun(stage, row, first.get(index)) for index, (row, _) in enumerate(of_episodes)]
    for turn in range(stage.max_steps):
        live = {index: each for index, each in enumerate(transcripts) if not each.done}
        if not live:
            break
        completions = _say(stage.engine, list(live.values()), sampling, group_size=1 if turn else group_size)
        _take_turn(stage, live, completions, is_last=turn == stage.max_steps - 1)
    _grade(stage, transcripts)
    return transcripts


def _begun(stage: Stage, row: Row, turn: Turn | None) -> Transcript:
    if turn is None:
        return Transcript(row, done=True, timed_out=True)
    transcript = stage.scribe.begin(row, turn, room=stage.room)
    if len(transcript.tokens) > stage.room:
        transcript.end(truncated=True)
    return transcript


def _say(engine: Engine, transcripts: Sequence[Transcript], sampling: Sampling, *, group_size: int) -> list[Completion]:
    """The model's turn in each episode. Whole groups that begin with the same tokens are one prompt each, read once."""
    contexts = [each.tokens for each in transcripts]
    groups = [contexts[start : start + group_size] for start in range(0, len(contexts), group_size)]
    if any(len(group) != group_size or any(each != group[0] for each in group) for group in groups):
        groups, group_size = [[context] for context in contexts], 1
    drawn = engine.sample([group[0] for group in groups], sampling, group_size=group_size)
    return [completion for group in drawn for completion in group]


def _take_turn(
    stage: Stage, live: Mapping[int, Transcript], completions: Sequence[Completion], *, is_last: bool
) -> None:
    """Hand what was said to the environments, and write down what they answer."""
    actions = {index: stage.scribe.action(said) for index, said in zip(live, completions, strict=True)}
    answers = stage.ask(lambda environments: environments.act(actions))
    for (index, transcript), completion in zip(live.items(), completions, strict=True):
        transcript.say(completion, actions[index].text)
        if index not in answers:
            transcript.end(timed_out=True)
            continue
        transcript.count(answers[index])
        if not transcript.done and not is_last:
            stage.scribe.observe(transcript, answers[index], room=stage.room)


def _grade(stage: Stage, transcripts: Sequence[Transcript]) -> None:
    """The reward of the whole episode, where the environment has one."""
    begun = [index for index, each in enumerate(transcripts) if not each.timed_out]
    graded = stage.ask(lambda environments: environments.grade(begun))
    for index in begun:
        if index not in graded:
            transcripts[index].end(timed_out=True)
        elif (reward := graded[index]) is not None:
            transcripts[index].rewards.append(reward)
