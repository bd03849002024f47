"""create_mnbn_model in one process."""

from typing import Any

import chainer
import numpy as np
import pytest
from chainer import functions as F
from chainer import links as L

from multibn import SingleProcess
from multibn.chainer_backend import (
    FinetunePopulationStatistics,
    MultiNodeBatchNormalization,
    create_mnbn_model,
)

LOCAL = SingleProcess()


class Named(L.BatchNormalization):
    """Only its constructor is its own."""

    def __init__(self, size: int, note: str) -> None:
        super().__init__(size)
        self.note = note


class Net(chainer.Chain):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        with self.init_scope():
            self.norm = norm


class Nets(chainer.ChainList):
    pass


class Conditional(chainer.Chain):
    """Normalizes by itself."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.add_persistent("avg_mean", np.zeros(size, "f"))

    def forward(self, x: Any) -> Any:
        one, zero = np.ones_like(self.avg_mean), np.zeros_like(self.avg_mean)
        return F.batch_normalization(x, one, zero, running_mean=self.avg_mean)


def model() -> Any:
    norm = Named(3, "kept")
    norm.add_hook(chainer.LinkHook())
    norm.gamma.array[...] = [1, 2, 3]
    norm.avg_mean[...] = [4, 5, 6]
    rest = chainer.Sequential(L.Linear(3, 4), L.BatchNormalization(4, eps=0.1, decay=0.8), F.relu)
    m = Nets(Net(norm), rest, norm)
    m.alias = [norm]
    return m


def everything(link: Any) -> dict[str, Any]:
    file: dict[str, Any] = {}
    chainer.serializers.DictionarySerializer(file).save(link)
    return file


def assert_alike(actual: Any, expected: Any) -> None:
    """Structure, names, numbers, what is shared, and attributes."""
    names = [sorted(dict(m.namedlinks())) for m in (actual, expected)]
    assert names[0] == names[1]
    files = everything(actual), everything(expected)
    assert files[0].keys() == files[1].keys()
    for name, value in files[1].items():
        np.testing.assert_array_equal(files[0][name], value)
    assert type(actual) is Nets
    assert actual[0].norm is actual[2] is actual.alias[0]
    assert actual[2].note == "kept"
    assert list(actual[2].local_link_hooks) == ["LinkHook"]
    assert actual[2].gamma is not expected[2].gamma
    assert (actual[1][1].eps, actual[1][1].decay) == (0.1, 0.8)


def test_every_container_is_converted() -> None:
    first = model()
    shared = create_mnbn_model(first, LOCAL, weighting="rank", avg_var="biased")
    assert_alike(shared, first)
    assert (shared[2].weighting, shared[2].avg_var_convention) == ("rank", "biased")
    assert {type(shared[2]), type(shared[1][1])} == {MultiNodeBatchNormalization}
    assert type(first[2]) is Named
    x = np.random.default_rng(0).normal(size=(6, 3)).astype("f")
    shared[1](shared[2](x))
    first.copyparams(shared)  # the way back
    assert_alike(first, shared)


@pytest.mark.parametrize(
    "options",
    [
        {"axis": (0, 1, 2)},
        {"axis": (0, 1, 2), "use_gamma": False},
        {"axis": (0, 1, 2), "use_beta": False, "initial_avg_var": 2},
        {"axis": (0, 1, 2), "use_beta": False, "use_gamma": False},
    ],
)
def test_links_of_all_options_are_converted(options: Any) -> None:
    """ChainerMN's function raises where a parameter is missing, and drops `axis`."""
    x = np.random.default_rng(0).normal(size=(4, 5, 6, 3)).astype("f")
    link = L.BatchNormalization(3, **options)
    new = create_mnbn_model(link, LOCAL)
    expected = link(x).array
    names = [name for name, _ in new.namedparams()]
    assert names == [name for name, _ in link.namedparams()]
    assert {"/gamma", "/beta"} & {f"/{name}" for name in vars(new)} == set(names)
    np.testing.assert_allclose(new(x).array, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(new.avg_var, link.avg_var, rtol=1e-5)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"size": 3, "eps": 0}, "`eps` must be .*: got 0"),
        ({"size": 3, "decay": 2}, "`decay` must be .*: got 2"),
        ({"size": 3, "axis": (0, 0)}, "`axis` must have 1 or more axes, each once"),
        ({"axis": 0}, r"link in `link` is not initialized \(size=None\)\. Call the model once"),
    ],
)
def test_the_numbers_of_links_are_checked(options: Any, message: str) -> None:
    """Chainer's link checks axes in a call; of axes named twice multibn made a wrong gradient."""
    with pytest.raises(ValueError, match=message):
        create_mnbn_model(chainer.ChainList(L.BatchNormalization(**options)), LOCAL)


def test_axes_are_put_in_order() -> None:
    link = create_mnbn_model(L.BatchNormalization(2, axis=[np.int64(2), 0]), LOCAL)
    assert repr(link.axis) == "(0, 2)"
    link(np.ones((3, 2, 4), "f"))


def test_a_class_that_was_copied_is_converted() -> None:
    """Copies and pickles leave a name in a class."""

    class Copied(L.BatchNormalization):
        pass

    plain = chainer.ChainList(Copied(3)).copy("copy")
    assert type(create_mnbn_model(plain, LOCAL)[0]) is MultiNodeBatchNormalization


@pytest.mark.parametrize(
    "options, kept",
    [
        ({"weighting": "rank"}, "weighting='element'"),
        ({"avg_var": "biased"}, "avg_var='unbiased_global'"),
        ({"nonfinite": "skip"}, "nonfinite=None"),
    ],
)
def test_a_second_conversion_with_other_options_warns(options: Any, kept: str) -> None:
    once = create_mnbn_model(L.BatchNormalization(3), LOCAL)
    message = rf"1 link\(s\) are synchronized already and keep their own options: /0 \({kept}\)\."
    with pytest.warns(UserWarning, match=message):
        create_mnbn_model(chainer.ChainList(once, L.BatchNormalization(3)), LOCAL, **options)
    told = r"nothing is converted\. Its links are already synchronized\."
    with pytest.warns(UserWarning, match=told):
        create_mnbn_model(once, LOCAL)


def test_a_model_without_batch_norms_is_only_copied() -> None:
    """And says so: the model may have links of ChainerMN's own."""
    link = L.Linear(2, 2)
    with pytest.warns(UserWarning, match="`link` has no L.BatchNormalization: nothing") as caught:
        converted = create_mnbn_model(link, LOCAL)
    assert caught[0].filename == __file__
    assert type(converted) is L.Linear
    assert converted.W is not link.W
    with pytest.raises(TypeError, match="a communicator must be None"):
        create_mnbn_model(link, "mpi")  # type: ignore[arg-type]


def test_a_link_with_a_forward_pass_of_its_own_is_left_alone() -> None:
    """The warning names the user's file."""
    message = (
        r"1 link\(s\) could not be converted, .*: /0 \(.*BatchRenormalization: .* forward, which"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        new = create_mnbn_model(chainer.ChainList(L.BatchRenormalization(3)), LOCAL)
    assert type(new[0]) is L.BatchRenormalization
    assert [w.filename for w in caught] == [__file__]


@pytest.mark.parametrize("other", [Conditional, L.DecorrelatedBatchNormalization])
def test_a_link_that_normalizes_by_itself_is_named_or_an_error(other: Any) -> None:
    """The converter and the extension that fine-tunes name it."""
    plain = Nets(Net(other(4)), L.BatchNormalization(4), Net(other(4)))
    why = rf"/0/norm, /2/norm \(.*\.{other.__name__}: not an L\.BatchNormalization\)\.$"
    with pytest.raises(TypeError, match=r"^2 link\(s\) could not be converted, .*: " + why):
        create_mnbn_model(plain, LOCAL, strict=True)
    with pytest.raises(TypeError, match=r"`link` has no L\.BatchN"):
        create_mnbn_model(L.Linear(2, 2), LOCAL, strict=True)
    with pytest.warns(UserWarning, match=r"^2 link\(s\) could not .*" + why) as caught:
        model: Any = create_mnbn_model(plain, LOCAL)
    with pytest.warns(UserWarning, match=r"^2 link\(s\) of `target` are not .*" + why) as again:
        FinetunePopulationStatistics([], model)
    assert {w.filename for w in [*caught, *again]} == {__file__}
    assert [type(link) for link in (model[0].norm, model[1])] == [
        other,
        MultiNodeBatchNormalization,
    ]


class Uncopied:
    """A communicator that cannot be copied, as one of MPI's that `split` has made."""

    def allreduce(self, x: Any) -> Any:
        return x

    def __reduce__(self) -> Any:
        raise ValueError("cannot serialize")


def test_communicators_among_attributes_are_not_copied() -> None:
    inner = Net(L.BatchNormalization(3))
    model = Nets(inner, Named(3, "kept"))
    inner.comm = model.comm = model[1].comm = Uncopied()
    new: Any = create_mnbn_model(model, LOCAL)
    assert new.comm is new[0].comm is new[1].__dict__["comm"] is model.comm
    assert type(new[0].norm) is MultiNodeBatchNormalization
