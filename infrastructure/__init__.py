"""The CDK app: one construct a file, and four tables that say what there is.

QUEUES (queues.py), RULES (rules.py), FUNCTIONS (functions.py) and GRANTS (grants.py) are plain data. A new handler is
one row in FUNCTIONS and its file in functions/; what wakes it is a row in QUEUES and one in RULES; what it may do is a
row in GRANTS. Every name is literal but for stage, account and region (see names.py), so that the SDK can compute it.
"""
