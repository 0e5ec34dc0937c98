"""The table of parameters: names, ties, groups and what changes under it."""

import pytest
import torch
from torch import Tensor, nn

from gradtrack.errors import UsageError
from gradtrack.gradients.parameters import ParameterTable
from tests.training import batch_loss, layer, look, small_model


def test_names_and_missing_gradients() -> None:
    """Parameters without a gradient are listed as missing, and are not zeros."""
    model = small_model()
    layer(model, 0).weight.grad = torch.ones(5, 6)
    grads = ParameterTable(model).gradients()
    assert grads.layout.names == ["0.weight"]
    assert grads.layout.missing == ["0.bias", "2.weight", "2.bias"]
    assert grads.layout.total_count == 30


def test_tied_parameters_are_there_once() -> None:
    """A weight with two names is one row, with its other name as an alias."""
    model = nn.Module()
    model.encoder, model.decoder = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    model.decoder.weight = model.encoder.weight
    table = ParameterTable(model)
    assert table.names == ["encoder.weight"]
    assert table.aliases == {"encoder.weight": ["decoder.weight"]}


def test_frozen_parameters_are_left_out() -> None:
    """A frozen parameter has no row and is not missing."""
    model = small_model()
    layer(model, 0).weight.requires_grad_(False)
    table = ParameterTable(model)
    assert "0.weight" not in table.names
    assert table.frozen == ["0.weight"]
    assert "0.weight" not in table.gradients().layout.missing


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_part_is_measured_like_any_other() -> None:
    """The parameters of a ScriptModule have their rows, and freezing one of them makes the table stale."""
    scripted = torch.jit.script(small_model())
    model = nn.Sequential(scripted, nn.Flatten())
    table = ParameterTable(model)
    torch.autograd.backward(batch_loss(model))
    assert table.gradients().layout.names == ["0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias"]
    assert not table.stale()
    next(model.parameters()).requires_grad_(False)
    assert table.stale()


class TestStale:
    """Changes of the model that the table notices."""

    def test_nothing_changed(self) -> None:
        """Training steps do not make a table stale."""
        model = small_model()
        table = ParameterTable(model)
        torch.autograd.backward(batch_loss(model))
        assert not table.stale()

    @pytest.mark.parametrize("change", ["frozen", "replaced", "added", "removed", "module", "deep"])
    def test_changes(self, change: str) -> None:
        """Freezing, replacing, adding or removing a parameter or a module is noticed."""
        model = nn.Sequential(small_model(), nn.Linear(3, 2))
        table = ParameterTable(model)
        inner = model[0]
        assert isinstance(inner, nn.Sequential)
        if change == "frozen":
            layer(inner, 0).weight.requires_grad_(False)
        elif change == "replaced":
            layer(inner, 0).weight = nn.Parameter(torch.zeros(5, 6))
        elif change == "added":
            inner.register_parameter("extra", nn.Parameter(torch.zeros(2)))
        elif change == "removed":
            layer(inner, 0).register_parameter("bias", None)
        elif change == "module":
            model.append(nn.Linear(2, 2))
        else:
            inner[2] = nn.Linear(5, 3)
        assert table.stale()


class TestUnusualGradients:
    """Gradients that are not plain dense numbers."""

    def embedding(self, *tokens: int) -> tuple[nn.Embedding, Tensor]:
        """Return an embedding with a sparse gradient, and the same gradient made dense."""
        model = nn.Embedding(1000, 4, sparse=True)
        torch.autograd.backward(model(torch.tensor(tokens)).square().sum())
        assert model.weight.grad is not None
        return model, model.weight.grad.to_dense()

    def test_sparse(self) -> None:
        """A sparse gradient is measured by its touched rows, each once."""
        model, dense = self.embedding(3, 3, 7)
        grads = ParameterTable(model).gradients()
        assert grads.touched_rows == {"weight": 2}
        assert grads.layout.total_count == 8
        assert torch.equal(grads.tensors[0].flatten().sort().values, dense[[3, 7]].flatten().sort().values)

    def test_changing_the_values_changes_the_gradient_when_installed(self) -> None:
        """What is done to the measured tensor is done to the gradient with `install`, and not before."""
        model, dense = self.embedding(3, 3, 7)
        grads = ParameterTable(model).gradients()
        grads.tensors[0].mul_(0.5)
        assert model.weight.grad is not None
        assert torch.equal(model.weight.grad.to_dense(), dense)
        grads.install()
        assert torch.allclose(model.weight.grad.to_dense(), dense * 0.5)

    def test_complex(self) -> None:
        """A complex gradient counts its real and imaginary parts, and its norm is that over |z|."""
        param = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        param.grad = torch.tensor([3 + 4j, 0, 1j])
        model = nn.Module()
        model.z = param
        grads = ParameterTable(model).gradients()
        assert grads.layout.total_count == 6
        assert float(torch.linalg.vector_norm(grads.tensors[0])) == pytest.approx(26**0.5)

    @pytest.mark.parametrize("action", ["measured", "clipped"])
    def test_conjugate(self, action: str) -> None:
        """A gradient that autograd leaves as a conjugate view is measured as what it is, and clipped like any other."""
        param = nn.Parameter(torch.tensor([1 + 2j, 3j]))
        model = nn.Module()
        model.z = param
        torch.autograd.backward((param.conj().resolve_conj() * torch.tensor([10 + 5j, 2 - 7j])).abs().sum())
        assert param.grad is not None
        assert param.grad.is_conj()
        grad, before = param.grad, param.grad.resolve_conj()
        norm = float(torch.linalg.vector_norm(torch.view_as_real(before)))
        report = look(model, max_grad_norm=0.5 if action == "clipped" else 1e9)
        assert report.statistics is not None
        assert report.statistics.mean == pytest.approx(float(torch.view_as_real(before).mean()))
        assert report.clipping.norm_before == pytest.approx(norm)
        if action == "measured":
            assert param.grad is grad
        else:
            assert torch.allclose(param.grad, before * (0.5 / norm))

    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
    def test_unknown_layout(self) -> None:
        """A layout that cannot be measured is named."""
        param = nn.Parameter(torch.zeros(2, 2).to_sparse_csr())
        param.grad = torch.ones(2, 2).to_sparse_csr()
        model = nn.Module()
        model.s = param
        with pytest.raises(UsageError, match="sparse_csr"):
            ParameterTable(model).gradients()
