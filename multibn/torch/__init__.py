"""Layers of torch whose batch statistics are shared between processes, and what trains them."""

from multibn.torch_backend import BatchNorm as BatchNorm
from multibn.torch_backend import NaiveSyncBatchNorm1d as NaiveSyncBatchNorm1d
from multibn.torch_backend import NaiveSyncBatchNorm2d as NaiveSyncBatchNorm2d
from multibn.torch_backend import NaiveSyncBatchNorm3d as NaiveSyncBatchNorm3d
from multibn.torch_backend import SubBatchNorm1d as SubBatchNorm1d
from multibn.torch_backend import SubBatchNorm2d as SubBatchNorm2d
from multibn.torch_backend import SubBatchNorm3d as SubBatchNorm3d
from multibn.torch_backend import SyncBatchNorm as SyncBatchNorm
from multibn.torch_backend import SyncBatchNorm1d as SyncBatchNorm1d
from multibn.torch_backend import SyncBatchNorm2d as SyncBatchNorm2d
from multibn.torch_backend import SyncBatchNorm3d as SyncBatchNorm3d
from multibn.torch_backend import average_gradients as average_gradients
from multibn.torch_backend import check_sync as check_sync
from multibn.torch_backend import checkpoint_contexts as checkpoint_contexts
from multibn.torch_backend import convert_sub_batchnorm as convert_sub_batchnorm
from multibn.torch_backend import convert_sync_batchnorm as convert_sync_batchnorm
from multibn.torch_backend import get_norm as get_norm
from multibn.torch_backend import join as join
from multibn.torch_backend import revert_sync_batchnorm as revert_sync_batchnorm
from multibn.torch_backend import step_statistics as step_statistics
from multibn.torch_backend import sync_batch_norm as sync_batch_norm
from multibn.torch_backend import sync_running_stats as sync_running_stats
from multibn.torch_backend import update_bn_stats as update_bn_stats
