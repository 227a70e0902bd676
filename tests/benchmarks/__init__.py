"""What `make bench` measures: each prints a table and writes build/<name>.json. Nothing here asserts on seconds."""
