"""How long our training step takes beside other libraries' steps: `python -m benchmarks` from the repository root.

`workload` says what is trained, `peers` and `ours` how each side trains it, `rank` is what one process does, `cells`
starts the processes, `asked` holds the ratios that were asked for, `table` prints and writes what came out; `phases`
shows where the time of our own step goes.
"""
