"""A language model as judge, behind any OpenAI-compatible endpoint: one question a completion, a number as the answer.

    {base_url}/chat/completions     "Rate from 0 to 10 … {prompt} … {completion}"   ->   "Clear and right. 8/10"   ->   0.8

An answer is kept by what was asked: the same completion is paid for once, in a group, over the run, and after a restart,
which makes the run exact though a judge may change its mind. The file lies with the checkpoints, whose folder is mirrored
to S3 (checkpoints/judge/<part>.jsonl).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..failures import UserFailure
from ..texts import printable
from ..user_code import Refusal
from .functions import text_of_last
from .http import Unanswered, Web, shown
from .scores import TIMED_OUT, Answer, Answers, Question
from .verdict import excerpt, score_in

if TYPE_CHECKING:
    from microtuning_core.domain.algorithms import JudgeSpec

FOLDER = "judge"
_AT_ONCE = 16
_FIELD = re.compile(r"\{\{(\w+)\}\}|\{([A-Za-z_]\w*)\}")


class JudgeReward:
    """Asks the judge about every completion it has not been asked about.

    Args:
        name: of the part, for messages.
        time_limit_s: of one completion, with all that it is asked again; waiting for the rate limit is not counted.
        keep: the folder for answers that were paid for.
        key: the endpoint's key; it is sent, and never shown.
    """

    def __init__(
        self,
        name: str,
        judge: JudgeSpec,
        *,
        time_limit_s: float,
        keep: Path | None = None,
        key: str | None = None,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._name, self._judge, self._time_limit_s, self._key = name, judge, time_limit_s, key
        self._url = judge.base_url.rstrip("/") + "/chat/completions"
        self._web = Web(_AT_ONCE, wait)
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="judge")
        self._told = Told(keep / f"{name}.jsonl" if keep else None)
        self._turn = Turns(judge.max_requests_per_minute, judge.max_requests, made=len(self._told.texts), wait=wait)
        self._options: dict[str, Any] = {"temperature": 0}

    def score(self, question: Question, *, step: int) -> Answers:
        """As Reward.score.

        Raises:
            UserFailure: the endpoint refuses, answers in another shape, or all of `max_requests` are spent.
        """
        try:
            asked = [fill(self._judge.prompt, fields_of(question, index)) for index in range(len(question))]
            keys = [key_of(self._judge, text) for text in asked]
            missing = {key: text for key, text in zip(keys, asked, strict=True) if key not in self._told.texts}
            failed = self._ask_all(missing)
        except Refusal as error:
            raise UserFailure(f"The reward {self._name}: {self._without_key(str(error))}") from error
        answers = [TIMED_OUT if key in failed else self._answer(self._told.texts[key]) for key in keys]
        return Answers(answers, cause=self._without_key(next(iter(failed.values()), "")))

    def _ask_all(self, missing: Mapping[str, str]) -> dict[str, str]:
        """Ask, and keep what comes even where another question fails; what was not answered, and why."""
        work = {key: self._threads.submit(self._ask, text) for key, text in missing.items()}
        said: dict[str, str] = {}
        failed: dict[str, str] = {}
        refusals: list[Refusal] = []
        for key, each in work.items():
            try:
                said[key] = each.result()
            except Unanswered as error:
                failed[key] = str(error)
            except Refusal as error:
                refusals.append(error)
        self._told.add(said)
        if refusals:
            raise refusals[0]
        return failed

    def _ask(self, text: str) -> str:
        body = {"model": self._judge.model, "messages": [{"role": "user", "content": text}]}
        try:
            return said_in(self._post(body | self._options))
        except Refusal as error:
            if not self._options or "temperature" not in str(error):
                raise
            self._options = {}  # some models take no temperature but their own
            return said_in(self._post(body))

    def _post(self, body: Mapping[str, Any]) -> Any:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        return self._web.post(
            self._url,
            body,
            limit_s=self._time_limit_s,
            headers=headers,
            tries=1 + self._judge.retries,
            before=self._turn.take,
        )

    def _answer(self, said: str) -> Answer:
        score = score_in(said, self._judge.scale)
        return Answer(score, notes={"said": excerpt(said)})

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._web.close()


# --- question and answer -----------------------------------------------------------------------------------------------


def fields_of(question: Question, index: int) -> dict[str, Any]:
    own = {"prompt": question.prompts[index], "completion": question.completions[index]}
    return question.row(index) | own


def fill(template: str, fields: Mapping[str, Any]) -> str:
    """The template with each {name} replaced; {{name}} stands for "{name}". What is filled in is not looked at again.

    Raises:
        Refusal: a name that is no column.
    """

    def found(match: re.Match[str]) -> str:
        if match[1]:
            return f"{{{match[1]}}}"
        if match[2] not in fields:
            raise Refusal(
                f"judge.prompt names {{{match[2]}}}, and the rows have {', '.join(sorted(fields))}. "
                f"Write {{{{{match[2]}}}}} for the word in braces itself"
            )
        return as_text(fields[match[2]])

    return _FIELD.sub(found, template)


def as_text(value: Any) -> str:
    """Messages as "role: content" lines, a single answer as its text."""
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(value) == 1 and value[0].get("role") == "assistant":
        return text_of_last(value)
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in value)


def said_in(answer: Any) -> str:
    try:
        content = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError) as error:
        expected = '{"choices": [{"message": {"content": "…"}}]}'
        raise Refusal(f"the judge answered {shown(answer)}; expected {expected}") from error
    return content if isinstance(content, str) else ""


def key_of(judge: JudgeSpec, text: str) -> str:
    return hashlib.sha256(json.dumps([judge.base_url, judge.model, text]).encode()).hexdigest()


# --- what is kept, and how fast ----------------------------------------------------------------------------------------


class Told:
    """What the judge said, by what it was asked; in a file that is only ever added to."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.texts: dict[str, str] = {}
        for line in path.read_text("utf-8").splitlines() if path and path.is_file() else []:
            self._read(line)

    def _read(self, line: str) -> None:
        try:
            saved = json.loads(line)
            self.texts[saved["asked"]] = saved["said"]
        except (ValueError, KeyError, TypeError):
            return  # the last line of a process that was killed

    def add(self, said: Mapping[str, str]) -> None:
        """Keep these; one write, so that a killed process leaves at most one line that is not whole."""
        self.texts.update({key: excerpt(text) for key, text in said.items()})
        if self._path is None or not said:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"asked": key, "said": printable(self.texts[key])}) for key in said]
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, ("\n" + "\n".join(lines) + "\n").encode())
        finally:
            os.close(descriptor)


class Turns:
    """Lets requests pass: so many within any minute, and so many over the run."""

    def __init__(self, per_minute: int, most: int | None, *, made: int, wait: Callable[[float], None]) -> None:
        self._per_minute, self._most, self._made, self._wait = per_minute, most, made, wait
        self._last: deque[float] = deque(maxlen=per_minute)
        self._lock = threading.Lock()

    def take(self) -> None:
        """Wait for a turn.

        Raises:
            Refusal: all requests of the run are spent.
        """
        with self._lock:
            if self._most is not None and self._made >= self._most:
                raise Refusal(
                    f"all judge.max_requests = {self._most} are spent. Raise it and resume the run: what was answered is "
                    "not asked again"
                )
            self._made += 1
            now_s = time.monotonic()
            free_at_s = max(now_s, self._last[0] + 60.0) if len(self._last) == self._per_minute else now_s
            self._last.append(free_at_s)
        if free_at_s > now_s:
            self._wait(free_at_s - now_s)
