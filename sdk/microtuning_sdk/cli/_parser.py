"""The whole argument parser, put together from the groups."""

from __future__ import annotations

import argparse
from importlib import metadata

from microtuning_sdk.cli import _checkpoints, _cost, _doctor, _local, _prices, _run, _runs, _tenants


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="microtuning",
        description="Post-training of language models: submit runs, follow them, and run the local cloud.",
        epilog="Exit status: 0 success, 1 failed run or unreachable stage, 2 a mistake in the request, 3 stopped run.",
    )
    parser.add_argument("--version", action="version", version=f"microtuning {metadata.version('microtuning')}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for group in (_run, _runs, _checkpoints, _cost, _prices, _tenants, _local, _doctor):
        group.add_parsers(verbs)
    return parser
