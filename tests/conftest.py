"""What all tests share."""

import os

# Before torch is loaded, here and in every process that a test starts: models are so small that a second thread only
# waits for the first, ranks are threads of which each would start a team, and other threads could give other bits.
os.environ["OMP_NUM_THREADS"] = "1"
