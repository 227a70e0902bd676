"""`microtuning runs rollouts`: what the model said and how it was scored, one completion a line."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from microtuning_sdk._run import Run
from microtuning_sdk.cli._common import add_json, add_run_id, add_stage, add_verb, count, print_json, print_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from microtuning_sdk._rollouts import Rollout

_PROMPT, _COMPLETION = 40, 80  # characters of each that a line shows


def add_to(inner: Any) -> None:
    rollouts = add_verb(inner, "rollouts", show_rollouts, "Show what the model said in a step and how it was scored.")
    add_run_id(rollouts)
    rollouts.add_argument("--step", metavar="N", type=count, help="of which step (default: the newest)")
    order = rollouts.add_mutually_exclusive_group()
    order.add_argument("--best", action="store_true", help="the highest rewards first")
    order.add_argument("--worst", action="store_true", help="the lowest rewards first")
    rollouts.add_argument(
        "--limit", type=count, metavar="N", default=20, help="how many completions at most (default: %(default)s)"
    )
    add_json(rollouts)
    add_stage(rollouts)


def show_rollouts(arguments: argparse.Namespace) -> None:
    run = Run(arguments.run_id, arguments.stage)
    order = "best" if arguments.best else "worst" if arguments.worst else "written"
    rollouts = run.rollouts(arguments.step, order=order)  # type: ignore[arg-type]
    if arguments.json:
        return print_json({"run_id": run.run_id, "rollouts": rollouts[: arguments.limit]})
    if not rollouts and arguments.step:
        return print(
            f"the log has nothing of step {arguments.step}: it is to come, or its lines had to go for later ones"
        )
    if rollouts:
        print(in_short(rollouts))
    names = components_of(rollouts)
    heads = [name.removeprefix("reward/") for name in names]
    columns = ["times", "reward", *heads, "advantage", "tokens", "row", "prompt", "completion"]
    shown = counted(rollouts)[: arguments.limit]
    return print_table(columns, [[times, *cells(each, names)] for each, times in shown])


def in_short(rollouts: Sequence[Rollout]) -> str:
    """ "step 40: 64 completions, reward -1 to 1, 0.52 on average, 2 not scored, 3 cut off" """
    scored = [each["reward"] for each in rollouts if each["reward"] is not None]
    parts = [f"step {rollouts[0]['step']}: {len(rollouts)} completions"]
    if scored:
        parts.append(f"reward {min(scored):.4g} to {max(scored):.4g}, {sum(scored) / len(scored):.4g} on average")
    if unscored := len(rollouts) - len(scored):
        parts.append(f"{unscored} not scored")
    if truncated := sum(each["truncated"] for each in rollouts):
        parts.append(f"{truncated} cut off")
    return ", ".join(parts)


def counted(rollouts: Sequence[Rollout]) -> list[tuple[Rollout, int]]:
    """What was said several times to the same prompt, and scored alike, is shown once."""
    alike = [json.dumps([each[name] for name in ("row", "completion", "reward")]) for each in rollouts]
    times = Counter(alike)
    first = dict(zip(reversed(alike), reversed(rollouts), strict=True))
    return [(first[key], count) for key, count in times.items()]


def components_of(rollouts: Sequence[Rollout]) -> list[str]:
    """Every part's name, in their order; the only part of a reward is the reward itself."""
    names = dict.fromkeys(name for each in rollouts for name in each["components"])
    return [name for name in names if name != "reward"]


def cells(rollout: Rollout, names: Sequence[str]) -> list[object]:
    numbers = [rollout["reward"], *(rollout["components"].get(name) for name in names), rollout["advantage"]]
    length = f"{rollout['tokens']} cut" if rollout["truncated"] else rollout["tokens"]
    texts = [beginning_cut(one_line(rollout["prompt"])), end_cut(one_line(rollout["completion"]))]
    return [*(None if number is None else f"{number:.4g}" for number in numbers), length, rollout["row"], *texts]


def one_line(said: Any) -> str:
    """Texts as they are, messages as "role: content", without anything that would move the cursor."""
    messages = said if isinstance(said, list) else [said]
    texts = [text_of(message, alone=len(messages) == 1) for message in messages]
    return "".join(character if character.isprintable() else _sign(character) for character in " ".join(texts))


def text_of(message: Any, *, alone: bool) -> str:
    if not isinstance(message, dict):
        return str(message)
    content = message.get("content") or ""
    return str(content) if alone else f"{message.get('role')}: {content}"


def _sign(character: str) -> str:
    return "⏎" if character == "\n" else "\\" + f"x{ord(character):02x}" if ord(character) < 256 else "\ufffd"


def beginning_cut(text: str) -> str:
    """A prompt's end is what tells it from others."""
    return text if len(text) <= _PROMPT else "…" + text[1 - _PROMPT :]


def end_cut(text: str) -> str:
    return text if len(text) <= _COMPLETION else f"{text[:_COMPLETION]}… +{len(text) - _COMPLETION}"
