"""The training job: a supervisor, an engine of post-training primitives, and one readable loop a recipe.

It plays SageMaker's container contract and talks to the control plane only through files under /opt/ml: channels come in,
checkpoints, progress.json, metrics and a failure file go out. Start reading at supervisor.py.
"""
