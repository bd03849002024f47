"""The engine: moments of a batch, merged over ranks by one allreduce, and running statistics.

This package imports kernels and communicators, and no framework.
"""

from multibn.engine.observing import LayerStatistics as LayerStatistics
from multibn.engine.observing import observing as observing
from multibn.engine.recompute import recording as recording
from multibn.engine.recompute import replaying as replaying
from multibn.engine.running import PopulationEstimator as PopulationEstimator
from multibn.engine.running import running_variance as running_variance
from multibn.engine.statistics import BatchStatistics as BatchStatistics
from multibn.engine.statistics import Moments as Moments
from multibn.engine.statistics import aggregate as aggregate
from multibn.engine.statistics import local_moments as local_moments
