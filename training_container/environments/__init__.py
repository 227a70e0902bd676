"""Environments of the user's: `reset` and `step`, behind one protocol, each episode in a process of its own.

    protocol.py     what the trainer and an environment say to each other
    own.py          the form `reset(**row) -> observation`, `step(action) -> observation, reward, done`
    tools.py        the form of TRL's environment_factory: `reset(**row)`, public methods are tools, `get_reward()`
    cookbook.py     the form of tinker-cookbook's Env: `initial_observation()`, `step(action) -> StepResult`
    worker.py       the process in which user code runs
    pool.py         those processes, as the trainer sees them
    play.py         episodes from their first observation to their last
    transcript.py   an episode as token ids, never tokenized again

To add a form: a module here with a class that has `begin`, `act` and `grade` (protocol.Episode), and its line in
`worker.form_of`. What a worker imports must stay light: it starts in a tenth of a second.
"""
