#include "host_view.h"

#include <ATen/EmptyTensor.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/ops/zeros.h>

#include "memory.h"
#include "messages.h"

namespace vmps {

int HostView::Index::find(const void* object) const {
  if (!map_.empty()) {
    auto found = map_.find(object);
    return found == map_.end() ? -1 : found->second;
  }
  for (size_t i = 0; i < objects_.size(); i++)
    if (objects_[i] == object) return static_cast<int>(i);
  return -1;
}

void HostView::Index::add(const void* object) {
  objects_.push_back(object);
  if (objects_.size() < kLinear) return;
  if (map_.empty())
    for (size_t i = 0; i + 1 < objects_.size(); i++) map_.emplace(objects_[i], static_cast<int>(i));
  map_.emplace(object, static_cast<int>(objects_.size() - 1));
}

void HostView::add(StoragePair pair) {
  device_storages_.add(pair.device.unsafeGetStorageImpl());
  host_storages_.add(pair.host.unsafeGetStorageImpl());
  storages_.push_back(std::move(pair));
}

void HostView::add(TensorPair pair) {
  device_tensors_.add(pair.device.unsafeGetTensorImpl());
  host_tensors_.add(pair.host.unsafeGetTensorImpl());
  tensors_.push_back(std::move(pair));
}

c10::Storage HostView::to_host(const c10::Storage& device) {
  const int known = device_storages_.find(device.unsafeGetStorageImpl());
  if (known >= 0) return storages_[known].host;
  c10::Storage host = host_alias(device);
  add({device, host, host.data_ptr().get(), host.nbytes()});
  return host;
}

c10::Storage HostView::to_device(const c10::Storage& host) {
  const int known = host_storages_.find(host.unsafeGetStorageImpl());
  if (known >= 0) return storages_[known].device;
  c10::Storage device(c10::Storage::use_byte_size_t(), host.nbytes(), device_alias(host), &device_allocator(),
                      /*resizable=*/true);
  add({device, host, host.data_ptr().get(), host.nbytes()});
  return device;
}

namespace {

void copy_flags(const at::Tensor& from, const at::Tensor& to) {
  if (from.is_conj()) to._set_conj(true);
  if (from.is_neg()) to._set_neg(true);
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

at::Tensor tensor_like(const at::Tensor& model, c10::Storage storage, c10::DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), model.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(model.sizes(), model.strides(), model.storage_offset());
  copy_flags(model, tensor);
  return tensor;
}

at::SparseTensorImpl* sparse(const at::Tensor& tensor) {
  return static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

void assign(const at::Tensor& to,
            const at::SparseTensorImpl& from,
            const at::Tensor& indices,
            const at::Tensor& values) {
  sparse(to)->raw_resize_(from.sparse_dim(), from.dense_dim(), from.sizes());
  sparse(to)->set_indices_and_values_unsafe(indices, values);
  sparse(to)->set_coalesced(from.coalesced());
}

void check_layout(const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == c10::Layout::Strided || tensor.layout() == c10::Layout::Sparse,
                              "virtual_mps has only strided and sparse (COO) tensors, got ", tensor.layout());
}

}  // namespace

at::Tensor HostView::sparse_to_host(const at::Tensor& tensor) {
  auto host =
      at::detail::make_tensor<at::SparseTensorImpl>(c10::DispatchKeySet(c10::DispatchKey::SparseCPU), tensor.dtype());
  assign(host, *sparse(tensor), to_host(sparse(tensor)->indices()), to_host(sparse(tensor)->values()));
  return host;
}

at::Tensor HostView::sparse_to_device(const at::Tensor& result) {
  auto device =
      at::detail::make_tensor<at::SparseTensorImpl>(c10::DispatchKeySet(c10::DispatchKey::SparseMPS), result.dtype());
  assign(device, *sparse(result), to_device(sparse(result)->indices()), to_device(sparse(result)->values()));
  return device;
}

at::Tensor HostView::to_host(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (!tensor.is_mps()) {
    host_arguments_.push_back(tensor);
    return tensor;
  }
  const int known = device_tensors_.find(tensor.unsafeGetTensorImpl());
  if (known >= 0) return tensors_[known].host;
  check_layout(tensor);
  at::Tensor host = tensor.is_sparse() ? sparse_to_host(tensor)
                                       : tensor_like(tensor, to_host(tensor.storage()), c10::DispatchKey::CPU);
  add({tensor, host});
  has_complex128_ |= tensor.scalar_type() == at::kComplexDouble;
  return host;
}

void HostView::write_back() {
  for (auto& pair : storages_) {
    const void* address = pair.host.data_ptr().get();
    if (address == pair.address && pair.host.nbytes() == pair.bytes) continue;
    if (address != pair.address) {
      c10::Storage moved(c10::Storage::use_byte_size_t(), pair.host.nbytes(), std::move(pair.host.mutable_data_ptr()),
                         nullptr, /*resizable=*/false);
      pair.device.unsafeGetStorageImpl()->set_data_ptr_noswap(device_alias(moved));
    }
    pair.device.set_nbytes(pair.host.nbytes());
  }
  for (size_t i = 0; i < tensors_.size(); i++) {
    if (tensors_[i].device.is_sparse()) {
      const at::Tensor host = tensors_[i].host;
      assign(tensors_[i].device, *sparse(host), to_device(sparse(host)->indices()), to_device(sparse(host)->values()));
      continue;
    }
    auto* device = tensors_[i].device.unsafeGetTensorImpl();
    auto* host = tensors_[i].host.unsafeGetTensorImpl();
    const c10::Storage storage = to_device(host->storage());
    if (storage.unsafeGetStorageImpl() != device->storage().unsafeGetStorageImpl())
      device->set_storage_keep_dtype(storage);
    if (device->sizes() != host->sizes() || device->strides() != host->strides() ||
        device->storage_offset() != host->storage_offset())
      device->set_sizes_and_strides(host->sizes(), host->strides(), host->storage_offset());
  }
}

at::Tensor HostView::to_device(const at::Tensor& result) {
  if (!result.defined() || !result.device().is_cpu()) return result;
  const int known = host_tensors_.find(result.unsafeGetTensorImpl());
  if (known >= 0) return tensors_[known].device;
  for (auto& argument : host_arguments_)
    if (argument.unsafeGetTensorImpl() == result.unsafeGetTensorImpl()) return result;
  check_layout(result);
  TORCH_CHECK_TYPE(result.scalar_type() != at::kDouble, kNoFloat64);
  TORCH_CHECK_TYPE(result.scalar_type() != at::kComplexDouble, kNoComplex128);
  if (result.is_sparse()) return sparse_to_device(result);
  if (result._is_zerotensor()) return to_device(at::zeros(result.sizes(), result.options()));  // has no storage
  return tensor_like(result, to_device(result.storage()), c10::DispatchKey::MPS);
}

}  // namespace vmps
