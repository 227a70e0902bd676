"""A row as a prompt and what may follow it, whatever its shape."""

from __future__ import annotations

from typing import Any

from microtuning_core.domain.datasets import Row, common_beginning

Part = str | list[dict[str, Any]]


def parts_of(row: Row) -> tuple[Part, list[Part]] | None:
    """`(prompt, completions)` of a row; None of one that only the user's own code understands."""
    values, prompt = row.values, row.values.get("prompt")
    match row.shape:
        case "text":
            return "", [values["text"]]
        case "messages":
            return values["messages"][:-1], [values["messages"][-1:]]
        case "prompt" | "chat_prompt":
            return values["prompt"], []
        case "prompt_completion" | "chat_prompt_completion" | "labelled" | "chat_labelled":
            return values["prompt"], [values["completion"]]
        case "preference" | "chat_preference":
            chosen, rejected = values["chosen"], values["rejected"]
            if prompt is not None:
                return prompt, [chosen, rejected]
            shared = common_beginning(chosen, rejected)
            return chosen[:shared], [chosen[shared:], rejected[shared:]]
    return None
