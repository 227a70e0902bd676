"""The logs of training jobs, as a sign of life."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from botocore.exceptions import ClientError

from microtuning_core.aws.errors import is_missing
from microtuning_core.domain.names import TRAINING_LOG_GROUP

if TYPE_CHECKING:
    from mypy_boto3_logs import CloudWatchLogsClient


class JobLogs:
    def __init__(self, logs: CloudWatchLogsClient) -> None:
        self._logs = logs

    def last_line_at(self, job_name: str) -> datetime | None:
        """When the job's newest log line was written, or None when it has none yet."""
        try:
            answer = self._logs.describe_log_streams(
                logGroupName=TRAINING_LOG_GROUP, logStreamNamePrefix=f"{job_name}/"
            )
        except ClientError as error:
            if is_missing(error):
                return None
            raise
        stamps = [stream["lastEventTimestamp"] for stream in answer["logStreams"] if "lastEventTimestamp" in stream]
        return datetime.fromtimestamp(max(stamps) / 1000, UTC) if stamps else None
