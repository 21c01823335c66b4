"""GEM, its training, its benches and the pipeline around them."""

import gc

# Importing torch and torchrec makes a million objects that stay, and the collector would search them again and again: a
# fifth of a process's start. It is back to its usual pace once a command parses its arguments (gem/cli.py).
USUAL_PACE = gc.get_threshold()
gc.set_threshold(1_000_000, *USUAL_PACE[1:])
