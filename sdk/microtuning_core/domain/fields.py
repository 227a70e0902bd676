"""Types of fields that several parts of a spec share."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from microtuning_core.domain.errors import InvalidName
from microtuning_core.domain.layout import parse_s3_uri

Json = Any  # what json.loads returns

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def as_value_error(check: Any) -> Any:
    """Names raise InvalidName; pydantic collects ValueError."""

    def checked(value: str) -> str:
        try:
            check(value)
        except InvalidName as error:
            raise ValueError(f"{error.message} {error.next_step}") from error
        return value

    return AfterValidator(checked)


def _model_source(value: str) -> str:
    if not (_HUB_ID.fullmatch(value) or value.startswith("s3://")):
        raise ValueError("is a hub id (name or owner/name) or an s3:// prefix; fit() uploads a local directory for you")
    return value


S3Location = Annotated[str, as_value_error(parse_s3_uri)]
ModelSource = Annotated[str, AfterValidator(_model_source)]
Share = Annotated[float, Field(ge=0, le=1)]
Probability = Annotated[float, Field(gt=0, le=1)]
# "module:name" in the code, or what fit() pickled.
CodeEntry = Annotated[str, Field(pattern=r"^([A-Za-z_][\w.]*:[A-Za-z_][\w.]*|pickle:[\w.-]+)$")]
