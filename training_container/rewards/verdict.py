r"""The number that a judge meant as its score, in whatever words and markup it said it.

A misread score is worse than none: a policy learns whatever makes a judge mention the top of its scale. So what belongs to
the scale is taken away first ("/10", "0-10", "10 = best"), and what stays doubtful is no score.

    **Score: 8** / 10  (0 = worst, 10 = best)      8
    Not a 10. It has 2 errors, I say 7 out of 10   7
    somewhere from 7 to 8                          none
"""

from __future__ import annotations

import re

MOST_CHARACTERS = 300
_LEFT_OUT = "\n[…]\n"
_NUMBER = r"(?<![\w.,])-?\d+(?:\.\d+)?(?!\w|[.,]\d)"
_OF_SCALE = "\ue000"  # stands behind a number of which the scale itself was said: "8/10", "8 out of 10"
_LABEL = (
    r"(?:\b|(?<=_))(?:score[sd]?|rat(?:e|es|ed|ing)|grade[sd]?)\b"
    r"(?:[\s:=>|'()\[\]{},]|[-–—](?!\d)|\b(?:is|it|this|that|the|as|an?|at|to|be|would|for|my|i|give|given|final|overall|"
    r"answer|response|completion|therefore|thus)\b)*+"
)
_TO = r"\s*(?:-|–|—|→|->|\.\.+|…|\bto\b|\bthrough\b|\bor\b)\s*"
_EXTREME = r"(?:the\s+)?(?:worst|best|lowest|highest|max(?:imum)?|min(?:imum)?)\b(?!\s*[:=])"
_OUT_OF = r"(?:/|\b(?:out\s+)?of\b)\s*(?:(?:an?|the|possible|total|maximum|max)\s+)*"

# Markup around a number, and what it becomes.
_MARKUP = [
    (r"\\[dt]?frac\s*{([^{}]*)}\s*{([^{}]*)}", r"\1/\2"),
    (r"\\(?:boxed|text|textbf|mathbf)\s*{([^{}]*)}", r" \1 "),
    (r"\\[()\[\],;! ]", " "),
    (r"</\w+>", " "),
    (r"<(\w+)>", r" \1: "),
    (r"(?<![^\W_])_+|_+(?![^\W_])", " "),
    (r"[*`$\"“”]", " "),
    ("[⁄∕／]", "/"),
    ("−", "-"),
]
# What is said of the scale rather than of the completion; in this order, for "7-8/10" is a range and no 8.
_ASIDE = [
    rf"{_NUMBER}(?:\s*/\s*{_NUMBER}){{2,}}",  # a date
    r"[\[(]\s*-?[\d.]+\s*[,;]\s*-?[\d.]+\s*[\])]",
    rf"\bbetween\s+{_NUMBER}\s+and\s+{_NUMBER}{_OF_SCALE}?",
    rf"{_NUMBER}{_OF_SCALE}(?:{_TO}{_NUMBER}{_OF_SCALE})+",
    rf"{_NUMBER}(?:{_TO}{_NUMBER})+{_OF_SCALE}?",
    rf"{_OUT_OF}{_NUMBER}",
    rf"{_NUMBER}[\s-]*(?:point|star)s?[\s-]+(?:scale|system|rating)\b",
    rf"\bscale\b\s*(?:[:=]|is|from|up\s+to)?\s*{_NUMBER}",
    rf"\b(?:max(?:imum)?|min(?:imum)?)\b(?:\W|\b(?:score|rating|grade|possible|is|of|points)\b)*?{_NUMBER}",
    rf"\b(?:worst|best|lowest|highest)\s*(?:=|:|\bis\b)\s*{_NUMBER}",
    rf"(?:\b(?:not|no|than|least|most)|n[’']t)\s+(?:be\s+)?(?:an?\s+)?{_NUMBER}{_OF_SCALE}?",
    rf"{_NUMBER}{_OF_SCALE}?\s*(?:would|could|should|means|requires|needs|if)\b",
]  # fmt: skip
_LEGEND = re.compile(
    rf"({_LABEL})?{_NUMBER}\s*(?:(?:=|\(|:|\b(?:is|being|means|meaning|for)\b)\s*{_EXTREME}|=\s*[^\W\d])", re.IGNORECASE
)
_FRACTION = re.compile(rf"({_NUMBER})(?:\s*(?:points?|stars?))?\s*\(?\s*{_OUT_OF}({_NUMBER})", re.IGNORECASE)
_SAID = re.compile(rf"({_LABEL})?({_NUMBER})({_OF_SCALE})?", re.IGNORECASE)
_NOTHING_MORE = re.compile(r"\W*(?:points?|stars?)?\W*", re.IGNORECASE)


def score_in(said: str, scale: float) -> float | None:
    """What the judge said, over `scale`; None (it abstains) where that is no number within ±scale, or not to be told.

    The last number after "score" or "rating"; else the last one that names the scale ("8/10"), the last of all where
    nothing follows it, or the only one.
    """
    number = _number_in(_without_scale(_without_markup(excerpt(said)), scale))
    return number / scale if number is not None and abs(number) <= scale else None


def excerpt(said: str) -> str:
    """Its beginning and its end, whole words of them: a score stands in either."""
    if len(said) <= MOST_CHARACTERS:
        return said
    half = (MOST_CHARACTERS - len(_LEFT_OUT)) // 2
    return re.sub(r"\S+\Z", "", said[:half]) + _LEFT_OUT + re.sub(r"\A\S+", "", said[-half:])


def _number_in(text: str) -> float | None:
    found = list(_SAID.finditer(text))
    labelled = [match for match in found if match[1]]
    strong = [match for match in found if match[1] or match[3]]
    if not strong:
        at_the_end = [match for match in found[-1:] if _NOTHING_MORE.fullmatch(text, match.end())]
        return _the_one(at_the_end or found)
    if labelled:
        return _the_one([labelled[-1], *strong[strong.index(labelled[-1]) :]])
    return _the_one([strong[-1], *(match for match in found[-1:] if _NOTHING_MORE.fullmatch(text, match.end()))])


def _the_one(matches: list[re.Match[str]]) -> float | None:
    """The number of all these; where they differ, nobody knows which one was meant."""
    numbers = {float(match[2]) for match in matches}
    return numbers.pop() if len(numbers) == 1 else None


def _without_markup(text: str) -> str:
    for pattern, instead in _MARKUP:
        text = re.sub(pattern, instead, text)
    return text


def _without_scale(text: str, scale: float) -> str:
    """Only the numbers that may be the score; those "of" the scale are marked, those of another one are gone."""

    def numerator(match: re.Match[str]) -> str:
        return f"{match[1]}{_OF_SCALE}" if float(match[2]) == scale else " "

    text = re.sub(r"(?<!maximum )(?<!max )\b(score|rating|grade)\s+of\b", r"\1:", text, flags=re.IGNORECASE)
    text = re.sub(_ASIDE[0], " ", text)
    text = _FRACTION.sub(numerator, text)
    if scale != 100:
        text = re.sub(rf"{_NUMBER}\s*%", " ", text)
    text = _LEGEND.sub(lambda match: match[0] if match[1] else " ", text)
    for pattern in _ASIDE[1:]:
        text = re.sub(pattern, " ", text, flags=re.IGNORECASE)
    return text
