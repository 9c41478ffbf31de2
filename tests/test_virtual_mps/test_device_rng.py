"""Random numbers: a generator of its own, reproducible, and apart from the CPU's."""

import pytest
import torch
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("mps")

DRAWS = {
    "normal_": lambda x: x.normal_(),
    "uniform_": lambda x: x.uniform_(),
    "random_": lambda x: x.random_(1000),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "exponential_": lambda x: x.exponential_(),
    "multinomial": lambda x: torch.multinomial(x.abs() + 1, 30, replacement=True),
    "randn": lambda x: torch.randn(50, device="mps"),
    "randint": lambda x: torch.randint(0, 1000, (50,), device="mps"),
    "randperm": lambda x: torch.randperm(50, device="mps"),
    "rand_like": lambda x: torch.rand_like(x),
    "dropout": lambda x: F.dropout(x + 1, 0.5),
    "native_dropout": lambda x: torch.native_dropout(x + 1, 0.5, True)[0],
    "kaiming": lambda x: torch.nn.init.kaiming_uniform_(x.view(2, -1)),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draws_follow_the_mps_seed_and_spare_the_cpu(draw):
    torch.manual_seed(7)
    cpu_state = torch.get_rng_state()
    first = draw(torch.zeros(50, device="mps")).clone()
    second = draw(torch.zeros(50, device="mps")).clone()
    assert first.is_mps
    assert torch.equal(torch.get_rng_state(), cpu_state), "a draw on mps must not advance the CPU's generator"
    assert not torch.equal(first, second)
    torch.mps.manual_seed(7)
    assert torch.equal(draw(torch.zeros(50, device="mps")), first)


def test_draws_on_the_cpu_spare_the_device():
    torch.mps.manual_seed(3)
    state = torch.mps.get_rng_state()
    torch.randn(100)
    assert torch.equal(torch.mps.get_rng_state(), state)


def test_state_has_the_macs_size_and_restores():
    state = torch.mps.get_rng_state()
    assert state.numel() == 36  # seven words and the seed
    first = torch.randn(5, device="mps")
    torch.mps.set_rng_state(state)
    assert torch.equal(torch.randn(5, device="mps"), first)
    with pytest.raises(RuntimeError, match="wrong size"):
        torch.mps.set_rng_state(torch.zeros(7, dtype=torch.uint8))


def test_generator_objects():
    generator = torch.Generator(device="mps").manual_seed(3)
    assert generator.device.type == "mps" and generator.initial_seed() == 3
    first = torch.rand(4, device="mps", generator=generator)
    clone = generator.clone_state()
    assert torch.equal(torch.rand(4, device="mps", generator=clone), torch.rand(4, device="mps", generator=generator))
    generator.manual_seed(3)
    assert torch.equal(torch.rand(4, device="mps", generator=generator), first)
    assert not torch.equal(torch.rand(4, device="mps", generator=torch.Generator(device="mps").manual_seed(4)), first)


def test_fork_rng():
    torch.mps.manual_seed(5)
    expected = torch.randn(3, device="mps")
    torch.mps.manual_seed(5)
    with torch.random.fork_rng(device_type="mps"):
        torch.randn(9, device="mps")
    assert torch.equal(torch.randn(3, device="mps"), expected)


def test_distribution():
    x = torch.randn(20000, device="mps").cpu().double()
    assert abs(x.mean()) < 0.03 and abs(x.std() - 1) < 0.03
    pieces = torch.cat([torch.rand(1, device="mps") for _ in range(2000)]).cpu().double()
    assert abs(pieces.mean() - 0.5) < 0.03, "successive draws must be independent"
    lag = torch.corrcoef(torch.stack([pieces[1:], pieces[:-1]]))[0, 1]
    assert abs(lag) < 0.1
