"""The names that most users of torch need. `multibn.torch_backend` has these and all others."""

from multibn.torch_backend import SyncBatchNorm as SyncBatchNorm
from multibn.torch_backend import average_gradients as average_gradients
from multibn.torch_backend import check_sync as check_sync
from multibn.torch_backend import convert_sub_batchnorm as convert_sub_batchnorm
from multibn.torch_backend import convert_sync_batchnorm as convert_sync_batchnorm
from multibn.torch_backend import join as join
from multibn.torch_backend import revert_sync_batchnorm as revert_sync_batchnorm
from multibn.torch_backend import step_statistics as step_statistics
from multibn.torch_backend import sync_running_stats as sync_running_stats
from multibn.torch_backend import update_bn_stats as update_bn_stats
