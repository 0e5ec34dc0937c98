"""Groups: of the user, of recurrent networks and of modules."""

import pytest
from torch import nn

from gradtrack.gradients.groups import assign_groups, is_recurrent
from gradtrack.gradients.parameters import ParameterTable


def groups(model: nn.Module, patterns: dict[str, str] | None = None) -> dict[str, str]:
    """Return the group of each parameter."""
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, assign_groups(model, names, patterns or {}), strict=True))


class Reader(nn.Module):
    """A recurrent network as people write it: embedding, recurrent layer, readout."""

    def __init__(self, cell: type[nn.Module], **options: object) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 4)
        self.core = cell(4, 6, **options)
        self.readout = nn.Linear(6, 2)


class Custom(nn.Module):
    """A cell that is written by hand and says what it is by its names."""

    def __init__(self) -> None:
        super().__init__()
        self.W_in, self.W_rec = nn.Linear(3, 4), nn.Linear(4, 4, bias=False)
        self.W_out, self.h_init = nn.Linear(4, 2), nn.Linear(2, 4)


@pytest.mark.parametrize("cell", [nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_recurrent_layers(cell: type[nn.Module]) -> None:
    """The type of the layer decides about its own weights, the order about the linear ones around it."""
    found = groups(Reader(cell))
    assert {group for name, group in found.items() if "weight_ih" in name} == {"W_in"}
    assert {group for name, group in found.items() if "weight_hh" in name} == {"W_rec"}
    assert {group for name, group in found.items() if "bias" in name} == {"biases"}
    assert (found["embed.weight"], found["readout.weight"]) == ("W_in", "W_out")


def test_projections_and_stacks() -> None:
    """Every layer, direction and projection of a stack is found."""
    found = groups(Reader(nn.LSTM, num_layers=2, bidirectional=True, proj_size=3))
    assert found["core.weight_hr_l1_reverse"] == found["core.weight_hh_l1"] == "W_rec"
    assert found["core.weight_ih_l1_reverse"] == "W_in"


def test_custom_cells_by_name() -> None:
    """Names decide where no layer does."""
    found = groups(Custom())
    assert is_recurrent(Custom())
    assert found == {
        "W_in.weight": "W_in",
        "W_in.bias": "biases",
        "W_rec.weight": "W_rec",
        "W_out.weight": "W_out",
        "W_out.bias": "biases",
        "h_init.weight": "W_h_init",
        "h_init.bias": "biases",
    }


@pytest.mark.parametrize("name", ["recall_head", "threshold", "wheel", "decoder_only"])
def test_ordinary_names_do_not_make_a_network_recurrent(name: str) -> None:
    """Only whole words of a name count."""
    model = nn.Module()
    model.add_module(name, nn.Linear(2, 2))
    assert not is_recurrent(model)


def test_by_module() -> None:
    """A plain network is grouped by its layers."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert groups(model) == {"0.weight": "0", "0.bias": "0", "2.weight": "2", "2.bias": "2"}


@pytest.mark.parametrize(("depth", "few", "many"), [(4, 4, 32), (12, 12, 32), (96, 96, 128), (400, 1, 128)])
def test_a_number_of_groups_that_can_be_looked_at(depth: int, few: int, many: int) -> None:
    """A stack of any depth gets a group for each block, or one for all where there are too many."""
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    model = nn.ModuleDict({"wte": nn.Embedding(5, 8), "h": nn.TransformerEncoder(layer, depth)})
    count = len(ParameterTable(model).group_names)
    assert few <= count <= many


def test_regexes_of_the_user_come_first() -> None:
    """The first pattern that is found wins, and the rest falls back."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert groups(model, {"first": r"^0\.", "weights": "weight"}) == {
        "0.weight": "first",
        "0.bias": "first",
        "1.weight": "weights",
        "1.bias": "1",
    }


def test_bare_parameters() -> None:
    """A parameter of the model itself is its own group."""
    model = nn.Module()
    model.alpha = nn.Parameter(nn.Linear(1, 1).weight.detach())
    assert groups(model) == {"alpha": "alpha"}
