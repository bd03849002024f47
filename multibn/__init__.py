"""Batch normalization whose statistics are shared between processes.

This module is the engine, which imports no framework. The layers are in `multibn.torch_backend` and
`multibn.chainer_backend`.
"""

from multibn._version import __version__ as __version__
from multibn.communicators import Communicator as Communicator
from multibn.communicators import Group as Group
from multibn.communicators import SingleProcess as SingleProcess
from multibn.communicators import as_communicator as as_communicator
from multibn.engine.population import PopulationEstimator as PopulationEstimator
from multibn.engine.population import running_variance as running_variance
from multibn.engine.population import update_running as update_running
from multibn.engine.recompute import LayerStatistics as LayerStatistics
from multibn.engine.recompute import observing as observing
from multibn.engine.recompute import recording as recording
from multibn.engine.recompute import replaying as replaying
from multibn.engine.statistics import BatchStatistics as BatchStatistics
from multibn.engine.statistics import Moments as Moments
from multibn.engine.statistics import aggregate as aggregate
from multibn.engine.statistics import batch_statistics as batch_statistics
from multibn.engine.statistics import local_moments as local_moments
from multibn.engine.statistics import merge_moments as merge_moments
from multibn.engine.statistics import normalize as normalize
