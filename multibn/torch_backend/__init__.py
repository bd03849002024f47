"""PyTorch layers whose batch statistics are shared between processes."""

from multibn.torch_backend.convert import BatchNorm as BatchNorm
from multibn.torch_backend.convert import convert_sync_batchnorm as convert_sync_batchnorm
from multibn.torch_backend.convert import revert_sync_batchnorm as revert_sync_batchnorm
from multibn.torch_backend.functional import sync_batch_norm as sync_batch_norm
from multibn.torch_backend.gradients import average_gradients as average_gradients
from multibn.torch_backend.modules import SyncBatchNorm as SyncBatchNorm
