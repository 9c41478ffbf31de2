"""Sparse (COO) tensors on the device, against the CPU's, and the dtype that nothing can be computed with."""

import pytest
import torch

pytestmark = [
    pytest.mark.usefixtures("mps"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
]

INDICES = [[0, 1, 1, 1], [2, 0, 2, 2]]


def _tensor(device: str) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor(INDICES), torch.tensor([3.0, 4.0, 5.0, 6.0]), (2, 3), device=device)


def test_its_parts_are_on_the_device():
    x = _tensor("mps")
    assert x.is_mps and x.layout is torch.sparse_coo and not x.is_coalesced() and x._nnz() == 4
    x = x.coalesce()
    assert x.is_coalesced() and x.indices().is_mps and x.values().tolist() == [3, 4, 11]


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.to_dense(),
        lambda x: (x + x).to_dense(),
        lambda x: x.t() @ torch.ones(2, 4, device=x.device),
        lambda x: torch.sparse.sum(x, dim=0).to_dense(),
        lambda x: torch.sparse.softmax(x, dim=1).to_dense(),
        lambda x: x.add_(x).coalesce().values(),
        lambda x: x.cpu().to_dense(),
    ],
)
def test_ops_match_the_cpu(op):
    torch.testing.assert_close(op(_tensor("mps")).cpu(), op(_tensor("cpu")), atol=0, rtol=0)


def test_moves_to_the_device():
    x = _tensor("cpu").to("mps")
    assert x.is_mps and x.to_dense().tolist() == _tensor("cpu").to_dense().tolist()


def test_gradients_through_it():
    x = torch.randn(3, 3, device="mps", requires_grad=True)
    (x.to_sparse() * 2).to_dense().sum().backward()
    assert x.grad.tolist() == torch.full((3, 3), 2.0).tolist()


def test_sparse_gradient_of_an_embedding():
    embedding = torch.nn.Embedding(5, 2, sparse=True).to("mps")
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([1, 1, 3], device="mps")).sum().backward()
    assert embedding.weight.grad.layout is torch.sparse_coo
    torch.optim.SGD(embedding.parameters(), lr=1.0).step()
    change = (embedding.weight.detach() - before).cpu()
    torch.testing.assert_close(change, -torch.tensor([0.0, 2, 0, 1, 0])[:, None].expand(5, 2))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_compressed_layouts_are_refused():
    with pytest.raises(NotImplementedError, match=r"only strided and sparse \(COO\) tensors, got SparseCsr"):
        torch.eye(2, device="mps").to_sparse_csr()


def test_complex128_moves_and_computes_nothing():
    x = torch.ones(2, dtype=torch.cdouble).to("mps")
    assert x.cpu().tolist() == [1, 1]
    refusal = "Trying to convert ComplexDouble to the MPS backend but it does not have support for that dtype."
    with pytest.raises(TypeError, match=refusal):
        torch.exp(x)
    with pytest.raises(TypeError, match=refusal):
        torch.ones(2, device="mps").to(torch.cdouble)
