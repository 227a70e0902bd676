"""One use case a file: what a handler does with the stores, told once and run by any handler that needs it."""
