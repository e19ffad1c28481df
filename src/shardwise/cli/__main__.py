"""`python -m shardwise.cli` is `shardwise`; ranks are started this way."""

from shardwise.cli import main

main(prog_name="shardwise")
