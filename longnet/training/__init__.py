"""The training job: how a step is taken, where a run lives, and what a person watching sees."""
