"""What a run would meet, found out before a machine is paid for: `python -m training_container.preflight FOLDER`.

lengths.py    rows in tokens: over the limit, labels cut away
templates.py  chat templates, padding, double BOS
trials.py     the user's reward, environment, loss or loop, tried on real rows

The SDK writes FOLDER/request.json and the rows beside it, and reads FOLDER/findings.jsonl, one finding a line, in the order
in which they were found; so what was found before a time limit struck is not lost. Imports nothing heavy but for a model
whose tokenizer is at hand.
"""
