"""The torch layer in one process."""

import inspect
import itertools
import warnings
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from multibn import observing
from multibn import torch_backend as tb
from multibn.torch_backend.layer.base import LayerOptions, SharingOptions
from tests.helpers.ranks import errors_of_rank_0, run_ranks
from tests.torch_backend.steps import step

NEEDS = "torch"

make: Any = tb.SyncBatchNorm  # of Any: what parameters and buffers are is not checked against None
NESTED = "the input must be a dense tensor: got a nested tensor of layout torch.strided"


def nested() -> Tensor:
    """Made when needed: a test that looks at all tensors cannot ask this one for its shape."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype")
        return torch.nested.nested_tensor([torch.zeros(3, 2), torch.zeros(3, 2)])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("tracks", [True, False])
@pytest.mark.parametrize(
    "build",
    [
        tb.SyncBatchNorm,
        lambda C, **options: tb.convert_sync_batchnorm(nn.BatchNorm2d(C, **options)),
        lambda C, **options: tb.SubBatchNorm2d(1, C, **options),
        lambda C, **options: tb.SyncInstanceNorm2d(C, affine=True, **options),
        lambda C, track_running_stats, **options: tb.SyncGroupNorm(2, C, **options),
    ],
    ids=["sync", "converted", "sub", "instance", "group"],
)
def test_gradients_do_not_depend_on_strides(build: Any, tracks: bool, training: bool) -> None:
    """torch's own of weight and bias do on CPU, where an axis of size 1 has an odd stride."""
    options = {"dtype": torch.float64, "track_running_stats": tracks}
    for shape in [(1, 4, 3, 2), (2, 4, 3, 1), (3, 4, 1, 3)]:
        values = torch.randn(2, *shape, dtype=torch.float64)
        results = []
        for order in itertools.permutations(range(4)):
            for orders in ((order, range(4)), (range(4), order)):
                x, dy = (
                    torch.empty_permuted(shape, [*given], dtype=v.dtype).copy_(v)
                    for v, given in zip(values, orders, strict=True)
                )
                results.append(step(build(4, **options).train(training), x, dy))
        for result in results:
            torch.testing.assert_close(result, results[0])


def _assigned(eps: Any, momentum: Any) -> nn.Module:
    layer = make(2)
    layer.eps, layer.momentum = eps, momentum
    return layer


class _Own(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        numbers: Any = self.weight, self.bias, self.training, torch.tensor(0.25), torch.tensor(0.5)
        return nn.functional.batch_norm(input, mean, var, *numbers)


@pytest.mark.parametrize(
    "build",
    [
        lambda eps, momentum: make(2, eps, momentum),
        _assigned,
        lambda eps, momentum: tb.SubBatchNorm1d(2, 2, eps, momentum),
        lambda eps, momentum: tb.SyncInstanceNorm1d(2, eps, momentum, track_running_stats=True),
        lambda eps, momentum: tb.convert_sync_batchnorm(nn.BatchNorm1d(2, eps, momentum)),
        lambda eps, momentum: tb.convert_sync_batchnorm(_Own(2, eps, momentum)),
        lambda eps, momentum: tb.convert_sync_groupnorm(nn.GroupNorm(2, 2, eps)),
    ],
    ids=["built", "assigned", "sub", "instance", "converted", "own forward", "group"],
)
def test_a_tensor_of_shape_is_a_number_as_in_torch(build: Any) -> None:
    tensors, numbers = build(torch.tensor(0.5), torch.tensor(0.25)), build(0.5, 0.25)
    x = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))
    for _ in "training", "evaluation":
        assert torch.equal(tensors(x), numbers(x))
        tensors.eval(), numbers.eval()
    for name, v in numbers.state_dict().items():
        assert torch.equal(tensors.state_dict()[name], v)
    assert tensors.norm_options == numbers.norm_options
    assert repr(tensors) == repr(numbers)


def test_a_tensor_of_shape_is_a_number_of_the_function() -> None:
    x, results = torch.tensor([[1.0], [3.0]]), []
    for eps, momentum in ((0.5, 0.25), (torch.tensor(0.5), torch.tensor(0.25))):
        running = {"running_mean": torch.zeros(1), "running_var": torch.ones(1)}
        y, _ = tb.sync_batch_norm(x, eps=eps, momentum=momentum, **running)  # type: ignore[arg-type]
        results.append([y, *running.values()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("number", [torch.tensor([0.5]), torch.tensor(0.5, requires_grad=True)])
def test_other_tensors_are_no_numbers_as_in_torch(number: Tensor) -> None:
    with pytest.raises(TypeError):
        nn.BatchNorm1d(2, eps=number)(torch.randn(4, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`eps` must be a number: got tensor"):
        make(2, eps=number)


def test_the_refusal_of_packed_and_quantized_inputs_names_the_cure() -> None:
    packed: Any = nn.utils.rnn.pack_sequence([torch.randn(3, 2), torch.randn(1, 2)])
    layer = tb.SyncBatchNorm(2)
    message = r"got PackedSequence\. Pad it: .*pad_packed_sequence\(x, b"
    with pytest.raises(TypeError, match=message):
        layer(packed)
    x, lengths = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
    y = layer(x.mT, lengths=lengths).mT
    rows = torch.cat([y[0], y[1, :1]])
    torch.testing.assert_close(rows.mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, of deprecated dtypes
        quantized = torch.quantize_per_tensor(torch.randn(3, 2), 0.1, 0, torch.quint8)
    with pytest.raises(TypeError, match=r"got torch\.quint8\. Call revert_sync_batchnorm on the m"):
        layer(quantized)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"weight": "ones"}, TypeError, "`weight` must be a torch.Tensor or None: got str"),
        ({"bias": [0.0] * 3}, TypeError, "`bias` must be a torch.Tensor or None: got list"),
        ({"weight": nested}, TypeError, "`weight` must be a dense tensor: got a nested tensor"),
        ({"weight": torch.ones(3, 1)}, ValueError,
         r"`weight` must have shape \(3,\).*: got \(3, 1\)"),
        ({"weight": torch.tensor(1.0)}, ValueError, "must have 1 channels.*of `weight` and `bias`"),
        ({"eps": 0.0}, ValueError, "`eps` must be"),
        ({"weighting": "size"}, ValueError, "`weighting` must be one of"),
        ({"x": "a batch"}, TypeError, "the input must be a torch.Tensor: got str"),
        ({"x": nested}, TypeError, NESTED),
        ({"x": torch.ones(3)}, ValueError, r"2 or more dimensions, \(N, C, \*spatial\).* \(3,\)"),
        ({"x": torch.ones(2, 3, device="meta")}, TypeError,
         "must have data: got a tensor on the meta device. To infer shapes, call a layer"),
        ({"bias": torch.ones(4)}, ValueError, r"`bias` must have shape \(3,\).*: got \(4,\)"),
        ({"x": torch.ones(2, 4)}, ValueError, "must have 3 channels.*of `weight` and `bias`"),
    ],
)  # fmt: skip
def test_bad_arguments_are_errors_on_all(options: Any, error: Any, message: str) -> None:
    def call(wrong: bool, group: Any) -> Any:
        right = {"x": torch.randn(2, 3), "weight": torch.ones(3), "bias": torch.zeros(3)}
        given: Any = right | (options if wrong else {})
        given = {name: v() if v is nested else v for name, v in given.items()}
        arrays = [given.pop(name) for name in right]
        return tb.sync_batch_norm(*arrays, process_group=group, **given)

    errors_of_rank_0(call, error, message)


def test_statistics_belong_to_the_caller_and_not_to_the_backward_pass() -> None:
    def gradient(changes: bool) -> Tensor:
        x = torch.arange(6.0, dtype=torch.float64)[:, None].requires_grad_()
        layer = make(1, affine=False)
        with observing() as seen:
            y, batch = tb.sync_batch_norm(layer(x))
        if changes:
            for each in (batch, seen[0].batch, seen[0].own):
                each.mean.add_(1)
                each.var.add_(1e-5).sqrt_()
        (y**3).sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(False), gradient(True))


def test_without_a_counter_a_cumulative_average_stays() -> None:
    """So does that of nn.BatchNorm1d, whose factor is 0 then."""
    x = torch.randn(4, 3)
    theirs, ours = nn.BatchNorm1d(3, momentum=None), tb.SyncBatchNorm(3, momentum=None)
    for layer in (theirs, ours):
        layer.num_batches_tracked = None
        layer(x)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)


@pytest.mark.parametrize("trained", [0, 2])
def test_a_state_without_a_counter_leaves_the_layers_own(trained: int) -> None:
    """So does that of nn.BatchNorm1d: what is loaded counts as `trained` batches."""
    batches = torch.randn(4, 6, 3, dtype=torch.float64)
    layer = tb.SyncBatchNorm(3, momentum=None, dtype=torch.float64)
    for x in batches[:trained]:
        layer(x)
    layer.load_state_dict({"running_mean": torch.full((3,), 7.0)}, strict=False)
    for x in batches[trained:]:
        layer(x)
    expected = (7.0 * trained + batches[trained:].mean(1).sum(0)) / 4
    torch.testing.assert_close(layer.running_mean, expected)
    assert layer.num_batches_tracked == 4


def test_one_value_per_channel_is_an_error() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel over all ranks"):
        make(3)(torch.ones(1, 3))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        make(3, track_running_stats=False).eval()(torch.ones(1, 3))
    make(3).eval()(torch.ones(1, 3))
    make(3)(torch.ones(1, 3, 2))


@pytest.mark.parametrize("fuse_relu", [False, True])
@pytest.mark.parametrize("mode", ["training", "compiled", "float16", "evaluation"])
def test_a_fused_relu_and_residual_equal_separate_ones(*, mode: str, fuse_relu: bool) -> None:
    """The numbers and gradients of torch's own layer, and of operations of their own."""
    generator = torch.Generator().manual_seed(0)
    narrow = mode == "float16"
    data = torch.randn(3, 4, 3, 5, 5, dtype=torch.float64, generator=generator)
    data = data.half() if narrow else data
    plain = nn.BatchNorm2d(3, dtype=torch.float64).train(mode != "evaluation")
    for parameter in (*plain.parameters(), plain.running_mean, plain.running_var):
        parameter.data.uniform_(0.5, 2, generator=generator)  # type: ignore[union-attr]
    ours = tb.SyncBatchNorm(3, fuse_relu=fuse_relu, dtype=torch.float64).train(plain.training)
    ours.load_state_dict(plain.state_dict())
    run = torch.compile(ours, backend="aot_eager") if mode == "compiled" else ours
    results = []
    for layer in (run, plain):
        x, residual = (data[i].clone().requires_grad_() for i in (0, 1))
        if layer is run:
            y = layer(x, residual)
        else:
            y = layer(x.double()) + residual
            y = (y.relu() if fuse_relu else y).to(x)
        y.backward(data[2])
        results.append([y, x.grad, residual.grad])
    results = [
        r + [p.grad for p in m.parameters()] for r, m in zip(results, (ours, plain), strict=True)
    ]
    atol = 2e-2 if narrow else 1e-9
    torch.testing.assert_close(*results, rtol=atol, atol=atol)
    torch.testing.assert_close(ours.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    "residual, error, message",
    [
        (torch.zeros(4, 3, 1), ValueError, r"shape and dtype of the input, \(4, 3, 2\).*\(4, 3, 1"),
        (torch.zeros(4, 3, 2).half(), ValueError, "torch.float32: got .* torch.float16"),
        (torch.ones(4), ValueError, "Pass masks and lengths by keyword: `mask=`, `lengths=`"),
        (1.0, TypeError, "`residual` must be a torch.Tensor: got float"),
        (
            nested,
            TypeError,
            "`residual` must be a dense tensor: got a nested tensor of layout torch.strided. Call "
            "torch.nested.to_padded_tensor, and exclude the padding by `mask`",
        ),
        (
            torch.zeros(4, 3, 2).to_sparse(),
            TypeError,
            r"`residual` must be a dense tensor: got layout torch.sparse_coo. Call to_dense\(\)",
        ),
        (
            torch.zeros(4, 3, 2, device="meta"),
            ValueError,
            "`residual` must be on the device of the input, cpu: got meta",
        ),
    ],
)
def test_a_wrong_residual_is_an_error_on_all(
    residual: Any, error: Any, message: str, capfd: Any
) -> None:
    x = torch.randn(4, 3, 2)
    residual = residual() if residual is nested else residual
    errors_of_rank_0(
        lambda wrong, group: tb.SyncBatchNorm(3, process_group=group)(x, residual if wrong else x),
        error,
        message,
    )
    assert "multibn: rank 0 in SyncBatchNorm: `residual` must " in capfd.readouterr().err
    with pytest.raises(error, match=message):
        tb.SyncBatchNorm(3).eval()(x, residual)


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var", "the input"])
def test_what_is_on_another_device_is_refused_on_all(name: str) -> None:
    def call(wrong: bool, group: Any) -> None:
        x, layer = torch.randn(4, 3), tb.SyncBatchNorm(3, process_group=group)
        if wrong and name == "the input":
            x = x.to("meta")
        elif wrong:
            part = getattr(layer, name).to("meta")
            setattr(layer, name, nn.Parameter(part) if "running" not in name else part)
        layer(x)

    told = "`weight` must be on the device of the input, meta: got cpu. Call `to` on the input or "
    if name != "the input":
        told = f"`{name}` must be on the device of the input, cpu: got meta"
    errors_of_rank_0(call, ValueError, told)


def test_the_search_for_a_layers_name_keeps_no_batch() -> None:
    """Python before 3.13 keeps the variables of a frame that somebody has looked at."""

    class Trainer:
        def __init__(self, group: Any) -> None:
            self.model = nn.Sequential(tb.SyncBatchNorm(3, process_group=group))

        def train(self) -> tuple[str, Any]:
            x = torch.randn(4, 3)
            alive = ref(x)
            self.model(x)
            del x
            layer: Any = self.model[0]
            return layer.layer_communicator.name, alive()

    assert run_ranks(2, lambda group: Trainer(group).train()) == [("0", None)] * 2


def test_a_residual_alone_may_need_second_derivatives() -> None:
    x, residual = torch.randn(4, 3), torch.randn(4, 3, requires_grad=True)
    y = tb.SyncBatchNorm(3, affine=False, fuse_relu=True)(x, residual)
    (gradient,) = torch.autograd.grad(y.sum(), residual, create_graph=True)
    torch.testing.assert_close(gradient, (y > 0).float())


def test_a_conversion_refuses_an_eps_that_is_not_positive() -> None:
    """Nothing but eps keeps a constant channel finite."""
    with pytest.raises(ValueError, match=r"`eps` must be in \[1\.18e-38, inf\): got 0\.0"):
        tb.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3, eps=0.0))


@pytest.mark.parametrize("built", [tb.SyncBatchNorm, tb.SubBatchNorm2d, tb.convert_sync_batchnorm])
def test_options_are_listed_and_others_refused(built: Any) -> None:
    parameters = inspect.signature(built).parameters
    for name, kind in SharingOptions.__annotations__.items():
        assert parameters[name].annotation == kind
        assert parameters[name].default == getattr(LayerOptions, name)
    arguments: list[Any] = [1, 2] if built is tb.SubBatchNorm2d else [2]
    given = [tb.SyncBatchNorm(2)] if built is tb.convert_sync_batchnorm else arguments
    message = f"argument 'decay': expected {', '.join(SharingOptions.__annotations__)}"
    with pytest.raises(TypeError, match=message):
        built(*given, decay=0.9)
