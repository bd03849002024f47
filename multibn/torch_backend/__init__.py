"""PyTorch layers whose batch statistics are shared between processes."""

from multibn.torch_backend import _least_torch  # noqa: F401  before all others
from multibn.torch_backend.convert.convert import BatchNorm as BatchNorm
from multibn.torch_backend.convert.convert import convert_sub_batchnorm as convert_sub_batchnorm
from multibn.torch_backend.convert.convert import convert_sync_batchnorm as convert_sync_batchnorm
from multibn.torch_backend.convert.convert import revert_sync_batchnorm as revert_sync_batchnorm
from multibn.torch_backend.convert.group_norm import (
    convert_sync_groupnorm as convert_sync_groupnorm,
)
from multibn.torch_backend.convert.slowfast import get_norm as get_norm
from multibn.torch_backend.layer.functional import sync_batch_norm as sync_batch_norm
from multibn.torch_backend.layer.modules import SyncBatchNorm as SyncBatchNorm
from multibn.torch_backend.layer.modules import SyncBatchNorm1d as SyncBatchNorm1d
from multibn.torch_backend.layer.modules import SyncBatchNorm2d as SyncBatchNorm2d
from multibn.torch_backend.layer.modules import SyncBatchNorm3d as SyncBatchNorm3d
from multibn.torch_backend.layer.naive import NaiveSyncBatchNorm1d as NaiveSyncBatchNorm1d
from multibn.torch_backend.layer.naive import NaiveSyncBatchNorm2d as NaiveSyncBatchNorm2d
from multibn.torch_backend.layer.naive import NaiveSyncBatchNorm3d as NaiveSyncBatchNorm3d
from multibn.torch_backend.layer.step_statistics import step_statistics as step_statistics
from multibn.torch_backend.layer.sub_batch_norm import SubBatchNorm1d as SubBatchNorm1d
from multibn.torch_backend.layer.sub_batch_norm import SubBatchNorm2d as SubBatchNorm2d
from multibn.torch_backend.layer.sub_batch_norm import SubBatchNorm3d as SubBatchNorm3d
from multibn.torch_backend.norms.batch_moments import batch_moments as batch_moments
from multibn.torch_backend.norms.batch_renorm import SyncBatchRenorm1d as SyncBatchRenorm1d
from multibn.torch_backend.norms.batch_renorm import SyncBatchRenorm2d as SyncBatchRenorm2d
from multibn.torch_backend.norms.batch_renorm import SyncBatchRenorm3d as SyncBatchRenorm3d
from multibn.torch_backend.norms.group_norm import SyncGroupNorm as SyncGroupNorm
from multibn.torch_backend.norms.instance_norm import SyncInstanceNorm1d as SyncInstanceNorm1d
from multibn.torch_backend.norms.instance_norm import SyncInstanceNorm2d as SyncInstanceNorm2d
from multibn.torch_backend.norms.instance_norm import SyncInstanceNorm3d as SyncInstanceNorm3d
from multibn.torch_backend.norms.running_norm import RunningNorm as RunningNorm
from multibn.torch_backend.precise_bn import update_bn_stats as update_bn_stats
from multibn.torch_backend.train.checkpointing import checkpoint_contexts as checkpoint_contexts
from multibn.torch_backend.train.join import join as join
from multibn.torch_backend.train.synchrony import average_gradients as average_gradients
from multibn.torch_backend.train.synchrony import check_sync as check_sync
from multibn.torch_backend.train.synchrony import sync_running_stats as sync_running_stats

# Static, unlike torch.nn.SyncBatchNorm.convert_sync_batchnorm: the result ignores the subclass.
SyncBatchNorm.convert_sync_batchnorm = staticmethod(convert_sync_batchnorm)
