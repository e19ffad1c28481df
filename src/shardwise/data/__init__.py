"""Data: samples in one global order, which ranks of any layout read together and resume from a save.

Data             a dataset, the order of its samples, and how far a run has read
DataPlace        which rows of a global batch are those of a rank
"""

from shardwise.data.cursors import Cursor, DataPlace
from shardwise.data.global_batches import Data, EngineOfData, RankBatches, first_batches

__all__ = ["Cursor", "Data", "DataPlace", "EngineOfData", "RankBatches", "first_batches"]
