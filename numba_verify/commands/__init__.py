"""The commands of `python -m numba_verify`, one module each: `add_arguments(parser)` and `run(arguments)`, which returns the exit status.

The first line of a module's docstring is the command's help text. What several commands need lies beside them: `console` (lines and
tables), `places` (GPU or host), `runners` (implementations and kernels), `batches` (random problems), `accuracy` (the contract's bounds).
"""
