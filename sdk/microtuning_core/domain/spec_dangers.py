"""What no spec may hold, whoever wrote it: values that cannot be stored, secrets in plain sight, and addresses that answer
with secrets.

    environment_variables: {HF_TOKEN: …}              a job's environment is readable by whoever may describe the job
    algorithm: {hyperparameters: {key: AKIA…}}        so are its hyperparameters
    reward: {entry: "http://169.254.169.254/…"}       the machine's own metadata, which a failure would repeat to its log

A message names the field and never repeats a value that may be secret.
"""

from __future__ import annotations

import ipaddress
import math
import re
import socket
import unicodedata
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from microtuning_core.domain.errors import InvalidName, Problem
from microtuning_core.domain.fields import Json
from microtuning_core.domain.layout import parse_s3_uri
from microtuning_core.domain.spec import RunSpec, locations

_MOST = 2**63 - 1
_MOST_USD = 10**9

_ENVIRONMENT_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED_ENVIRONMENT = ("MICROTUNING_", "SM_", "AWS_")

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRETS = frozenset({"secret", "secrets", "password", "passwd", "passphrase", "credential", "credentials", "apikey"})
_KEYS = frozenset({"api", "access", "private", "secret", "license", "signing"})
# A token of text is no secret: pad_token, eos_token, max_tokens, TOKENIZERS_PARALLELISM.
_TOKENS_OF_TEXT = frozenset(
    {"pad", "eos", "bos", "unk", "mask", "sep", "cls", "end", "stop", "start", "special", "image", "per", "max", "new"}
)
# What the issuers write at the beginning of their keys, so that scanners find them.
_SECRET_VALUE = re.compile(
    r"\b(AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_[A-Za-z0-9_]{30,}"
    r"|\bhf_[A-Za-z0-9]{30,}|\bsk-[A-Za-z0-9_-]{20,}|\bxox[abprs]-[A-Za-z0-9-]{10,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
_IN_PLAIN_SIGHT = "looks like a secret, and {} readable by whoever may describe the job; keep it in Secrets Manager"


def dangers(spec: RunSpec) -> Iterator[Problem]:
    """Of a spec whose fields are each valid."""
    yield from _name_problems(spec.name)
    if spec.budget_usd is not None and spec.budget_usd >= _MOST_USD:
        yield Problem("budget_usd", "is below a billion")
    if spec.algorithm.type == "script":
        yield from _secrets(spec.algorithm.hyperparameters, "algorithm.hyperparameters")
    yield from _unclear_places(spec)
    for field, url in _addresses(spec):
        yield from (Problem(field, message) for message in _address_faults(url))


# --- values that cannot be stored ------------------------------------------------------------------------------------


def unstorable(value: Json, path: str) -> Iterator[Problem]:
    """Numbers that JSON does not have, and text that UTF-8 or a process's environment does not take."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _unstorable_text(str(name), path or "spec")
            yield from unstorable(part, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from unstorable(part, f"{path}.{i}")
    elif isinstance(value, int) and abs(value) > _MOST:
        yield Problem(path, "is a number of more than 64 bits")
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(path, "is not a finite number")
    elif isinstance(value, str):
        yield from _unstorable_text(value, path)


def _unstorable_text(text: str, path: str) -> Iterator[Problem]:
    if "\0" in text:
        yield Problem(path, "holds a NUL character")
    elif any("\ud800" <= character <= "\udfff" for character in text):
        yield Problem(path.encode("utf-8", "replace").decode(), "holds half of a surrogate pair (\\ud8… alone)")


def _name_problems(name: str) -> Iterator[Problem]:
    """A name is shown on terminals and pages: nothing in it may move the cursor, or turn the text around."""
    hidden = [each for each in name if unicodedata.category(each) in ("Cc", "Zl", "Zp") or _turns_around(each)]
    if hidden:
        yield Problem("name", f"holds the invisible character U+{ord(hidden[0]):04X}; a name is plain text of one line")


def _turns_around(character: str) -> bool:
    return "\u202a" <= character <= "\u202e" or "\u2066" <= character <= "\u2069"


# --- secrets ---------------------------------------------------------------------------------------------------------


def environment_problems(variables: Any) -> list[Problem]:
    """SageMaker takes at most 100 pairs, a key of letters, digits and _ (512), a value of 512 characters."""
    if not isinstance(variables, Mapping):
        return []
    problems = [Problem("environment_variables", "at most 100 are possible")] if len(variables) > 100 else []
    for name, value in variables.items():
        field = f"environment_variables.{name}"
        problems += [Problem(field, message) for message in _environment_faults(str(name), value)]
    return problems


def _environment_faults(name: str, value: Any) -> Iterator[str]:
    if not _ENVIRONMENT_NAME.fullmatch(name) or len(name) > 512:
        yield "a name is letters, digits and _, not starting with a digit"
    if name.startswith(_RESERVED_ENVIRONMENT):
        yield f"names starting with {', '.join(_RESERVED_ENVIRONMENT)} are reserved"
    if isinstance(value, str) and len(value) > 512:
        yield f"its value has {len(value)} characters; SageMaker takes 512"
    if is_secret_name(name) or _is_secret_value(value):
        yield _IN_PLAIN_SIGHT.format("a job's environment is")


def _secrets(value: Json, field: str) -> Iterator[Problem]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            if isinstance(part, str) and part and is_secret_name(str(name)):
                yield Problem(f"{field}.{name}", _IN_PLAIN_SIGHT.format("hyperparameters are"))
            else:
                yield from _secrets(part, f"{field}.{name}")
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from _secrets(part, f"{field}.{i}")
    elif _is_secret_value(value):
        yield Problem(field, _IN_PLAIN_SIGHT.format("hyperparameters are"))


def is_secret_name(name: str) -> bool:
    """HF_TOKEN, apiKey, db_password; not pad_token, max_tokens, TOKENIZERS_PARALLELISM.

    >>> [is_secret_name(each) for each in ("AWS_SECRET_ACCESS_KEY", "hubToken", "eos_token", "key_bits")]
    [True, True, False, False]
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    pairs = pairwise(words)
    is_key = any(first in _KEYS and second == "key" for first, second in pairs)
    is_token = words[-1:] == ["token"] and not _TOKENS_OF_TEXT & set(words)
    return is_key or is_token or bool(_SECRETS & set(words))


def _is_secret_value(value: Any) -> bool:
    return isinstance(value, str) and _SECRET_VALUE.search(value) is not None


# --- places and addresses --------------------------------------------------------------------------------------------


def _unclear_places(spec: RunSpec) -> Iterator[Problem]:
    """Fields that take an S3 prefix among other things have no check of their own."""
    for field, uri in locations(spec):
        try:
            parse_s3_uri(uri)
        except InvalidName as error:
            yield Problem(field, f"{error.message} {error.next_step}")


def _addresses(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """`(field, url)` of everything that is asked over HTTP."""
    reward = spec.reward
    for name, part in (reward.named_parts if reward else {}).items():
        at = "reward" if reward and reward.entry else f"reward.parts.{name}"
        if part.entry.startswith(("http://", "https://")):
            yield f"{at}.entry", part.entry
        if part.judge:
            yield f"{at}.judge.base_url", part.judge.base_url


def _address_faults(url: str) -> Iterator[str]:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        yield "is no address that can be asked"
        return
    if not host:
        yield "is no address that can be asked: it names no host"
    elif parts.username is not None or parts.password is not None:
        yield "holds a user or a password; a judge's key is named by key_name, and kept in Secrets Manager"
    elif _answers_with_credentials(host):
        yield "is the machine's own metadata, which answers with its credentials"


def _answers_with_credentials(host: str) -> bool:
    """Link-local addresses (169.254.169.254 and its kin), in every way of writing them, and the names of such services."""
    if host.rstrip(".").endswith(("metadata.google.internal", "instance-data", "instance-data.ec2.internal")):
        return True
    address = _as_address(host)
    if address is None:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_link_local or address == ipaddress.ip_address("fd00:ec2::254")


def _as_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        pass
    try:  # 0xA9FEA9FE, 2852039166, 0251.0376.0251.0376: what the C library takes, urllib3 takes too
        return ipaddress.IPv4Address(socket.inet_aton(unicodedata.normalize("NFKC", host)))
    except (OSError, ValueError):
        return None
